"""The costs of layer calls, by which a model is cut: given, measured, or estimated from weights and outputs."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from statistics import mean
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.functional_graph import FunctionalGraph
from tfdist.keras_internals.layer_calls import LayerCall

_RESOLUTION = 10**6  # a cost counts in millionths of the sum


def layer_costs(calls: Sequence[LayerCall], given: Mapping[str, float] | None) -> list[int]:
    """Returns by call its cost, on any scale: estimated, or `given` by the name of a layer; other layers cost nothing.

    Raises:
        ValueError: A name is not that of a layer.
    """
    if given is None:
        return [estimated_cost(call) for call in calls]
    names = [call.name for call in calls]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(
            f"The costs name layers that the model does not have. Received: {unknown}. Expected: names among "
            f"{list(dict.fromkeys(names))}. Measure the costs of this model, by `strategy.measure_costs`."
        )
    costs = [float(given.get(name, 0.0)) for name in names]
    return [round(cost / (sum(costs) or 1.0) * _RESOLUTION) for cost in costs]


def estimated_cost(call: LayerCall) -> int:
    """Returns an estimate of the time of a layer call per sample: weights times positions, plus outputs.

    A matrix is multiplied with each position of a sequence or an image. An embedding only copies rows.
    """
    activations = sum(elements_of(tensor) for tensor in call.outputs)
    if not isinstance(call.operation, keras.layers.Layer) or isinstance(call.operation, keras.layers.Embedding):
        return activations
    shape = call.outputs[0].shape if call.outputs else ()
    positions = prod(size or 1 for size in shape[1:-1])
    return int(call.operation.count_params()) * positions + activations if call.operation.built else activations


def elements_of(tensor: Any) -> int:
    """Returns the number of elements of a symbolic tensor per sample; unknown sizes count as 1."""
    return prod(size or 1 for size in tensor.shape[1:])


_REPETITIONS = 5


def measured_costs(graph: FunctionalGraph, x: Any, device: str) -> dict[str, float]:
    """Returns by the name of a layer the seconds that one call of it takes on `device`, forward and backward.

    Each layer is computed in training, in a separate function: once to compile it, then five times, of which the
    shortest counts. Masks of its inputs are left out. Weights and states do not change. `x` are the inputs of a
    micro-batch.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    values = dict(zip(map(id, graph.inputs), graph.flat_inputs(x), strict=True))
    for call in graph.calls:
        results, duration = _timed(call, values, device)
        values |= {id(symbolic): result for symbolic, result in zip(call.outputs, results, strict=True)}
        seconds[call.name].append(duration)
    return {name: mean(of_calls) for name, of_calls in seconds.items()}


def _timed(call: LayerCall, values: dict[int, Any], device: str) -> tuple[list[tf.Tensor], float]:
    variables = call.variables
    is_trainable = [variable.trainable for variable in variables]
    symbolic = list({id(tensor): tensor for tensor in call.inputs}.values())

    def run(tensors: list[tf.Tensor], weights: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        trained = [weight for weight, trains in zip(weights, is_trainable, strict=True) if trains]
        sources = [one for one in [*tensors, *trained] if one.dtype.is_floating]
        scope = keras.StatelessScope(list(zip(variables, weights, strict=True)), collect_losses=True)
        with tf.GradientTape(watch_accessed_variables=False) as tape, scope:
            tape.watch(sources)
            given = dict(zip(map(id, symbolic), tensors, strict=True))
            results = [tf.convert_to_tensor(one) for one in call(given, training=True)]
            targets = [tf.reduce_sum(tf.cast(one, tf.float32)) for one in [*results, *scope.losses] if _is_real(one)]
        gradients = tape.gradient(tf.add_n(targets), sources) if targets and sources else []
        ends = [tf.reduce_sum(tf.cast(getattr(one, "values", one), tf.float32)) for one in gradients if one is not None]
        return results, tf.add_n([tf.zeros([]), *targets, *ends])

    function = tf.function(run, autograph=False)
    with tf.device(device):
        tensors = [tf.identity(values[id(one)]) for one in symbolic]
        weights = [tf.identity(variable.value) for variable in variables]
        results, end = function(tensors, weights)
        end.numpy()  # a device computes asynchronously
        durations = []
        for _ in range(_REPETITIONS):
            start = time.perf_counter()
            function(tensors, weights)[1].numpy()
            durations.append(time.perf_counter() - start)
    return results, min(durations)


def _is_real(tensor: Any) -> bool:
    return tf.convert_to_tensor(tensor).dtype.is_floating
