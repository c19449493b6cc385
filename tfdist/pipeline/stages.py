"""The stages of a model: the costs by which it is cut, the layer calls, tensors and variables of each, and a table.

Costs of layer calls are given, measured, or estimated from weights and outputs.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from statistics import mean
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.functional_graph import FunctionalGraph
from tfdist.keras_internals.layer_calls import LayerCall
from tfdist.pipeline.pipeline import Pipeline, most_held
from tfdist.utils.balanced_starts import balanced_starts
from tfdist.utils.formatting import align_columns, format_bytes, format_count, short_device

_RESOLUTION = 10**6  # a cost counts in millionths of the sum


def layer_costs(calls: Sequence[LayerCall], given: Mapping[str, float] | None) -> list[int]:
    """Returns by call its cost, on any scale: estimated, or `given` by the names of layers; others cost nothing."""
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
        sources = [tensor for tensor in [*tensors, *trained] if tensor.dtype.is_floating]
        scope = keras.StatelessScope(list(zip(variables, weights, strict=True)), collect_losses=True)
        with tf.GradientTape(watch_accessed_variables=False) as tape, scope:
            tape.watch(sources)
            given = dict(zip(map(id, symbolic), tensors, strict=True))
            results = [tf.convert_to_tensor(result) for result in call(given, training=True)]
            computed = [tf.convert_to_tensor(result) for result in [*results, *scope.losses]]
            targets = [tf.reduce_sum(tf.cast(tensor, tf.float32)) for tensor in computed if tensor.dtype.is_floating]
        gradients = tape.gradient(tf.add_n(targets), sources) if targets and sources else []
        present = [gradient for gradient in gradients if gradient is not None]
        ends = [tf.reduce_sum(tf.cast(getattr(gradient, "values", gradient), tf.float32)) for gradient in present]
        return results, tf.add_n([tf.zeros([]), *targets, *ends])

    function = tf.function(run, autograph=False)
    with tf.device(device):
        tensors = [tf.identity(values[id(tensor)]) for tensor in symbolic]
        weights = [tf.identity(variable.value) for variable in variables]
        results, end = function(tensors, weights)
        end.numpy()  # a device computes asynchronously
        durations = []
        for _ in range(_REPETITIONS):
            start = time.perf_counter()
            function(tensors, weights)[1].numpy()
            durations.append(time.perf_counter() - start)
    return results, min(durations)


@dataclass(frozen=True)
class Stage:
    """A contiguous part of the layer calls of a model.

    Attributes:
        index: The number of the stage, from 0.
        calls: Its calls, in order.
        inputs: The symbolic tensors that it receives: inputs of the model, and outputs of earlier stages.
        outputs: The symbolic tensors that it sends to later stages, or that are outputs of the model.
        variables: The variables that its calls use.
    """

    index: int
    calls: tuple[LayerCall, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    variables: tuple[keras.Variable, ...]


class ModelStages:
    """All stages of a model.

    Attributes:
        graph: The graph of the model.
        stages: Its parts.
        owner: By the id of a variable, the number of the first stage that uses it, on whose device it is
            created.
    """

    def __init__(self, graph: FunctionalGraph, starts: Sequence[int], of_loss: Sequence[keras.Variable] = ()) -> None:
        """Cuts the calls of `graph` before the positions `starts`, of which the first is 0.

        `of_loss` are variables that the last stage uses, beside those of its layers.
        """
        self.graph, self._of_loss = graph, of_loss
        ends = [*starts[1:], len(graph.calls)]
        parts = [tuple(graph.calls[start:end]) for start, end in zip(starts, ends, strict=True)]
        self._maker = {
            id(tensor): index for index, part in enumerate(parts) for call in part for tensor in call.outputs
        }
        self.stages = tuple(self._stage(index, part, len(parts) - 1) for index, part in enumerate(parts))
        self.owner: dict[int, int] = {}
        for stage in self.stages:
            for variable in stage.variables:
                self.owner.setdefault(id(variable), stage.index)

    def _stage(self, index: int, calls: tuple[LayerCall, ...], last: int) -> Stage:
        wanted = [tensor for call in calls for tensor in call.inputs]
        if index == last:
            wanted += self.graph.outputs
        received = _unique(tensor for tensor in wanted if self._maker.get(id(tensor), -1) != index)
        variables = [variable for call in calls for variable in call.variables]
        variables += self._of_loss if index == last else ()
        return Stage(index, calls, received, self._sent(index), _unique(variables))

    def _sent(self, index: int) -> tuple[Any, ...]:
        """The outputs of a stage that calls of later stages take, or that the model returns."""
        later = [
            tensor for call in self.graph.calls if self._maker[id(call.outputs[0])] > index for tensor in call.inputs
        ]
        return _unique(tensor for tensor in [*later, *self.graph.outputs] if self._maker.get(id(tensor)) == index)

    def maker(self, tensor: Any) -> int:
        """Returns the stage that computes a symbolic tensor; -1 for an input of the model."""
        return self._maker.get(id(tensor), -1)

    def has_samples(self, tensor: Any) -> bool:
        """Whether the first axis of a symbolic tensor holds the samples of a batch."""
        return bool(len(tensor.shape)) and tensor.shape[0] == self.graph.inputs[0].shape[0]

    @cached_property
    def variables(self) -> tuple[keras.Variable, ...]:
        """The variables of all stages, each once, by owner."""
        return _unique(variable for stage in self.stages for variable in stage.variables)


def stages_of(graph: FunctionalGraph, pipeline: Pipeline, of_loss: Sequence[keras.Variable] = ()) -> ModelStages:
    """Cuts a model as the options of the pipeline say; `of_loss` are variables that only the loss uses."""
    if pipeline.stages > len(graph.calls):
        raise ValueError(
            f"The model has fewer layers than the pipeline has stages. Received: {len(graph.calls)} layers "
            f"({', '.join(call.name for call in graph.calls)}) and stages={pipeline.stages}. Expected: at least one "
            "layer for each stage. A layer inside of another layer is not counted separately: use fewer stages, or "
            "write the inner layers directly into the model. To compute a small part of a trained model, call it: "
            "`model(x)`."
        )
    if pipeline.cuts is not None:
        return ModelStages(graph, named_starts([call.name for call in graph.calls], pipeline.cuts), of_loss)
    costs = layer_costs(graph.calls, pipeline.costs)
    return ModelStages(graph, balanced_starts(costs, pipeline.stages, _crossing_elements(graph)), of_loss)


def _crossing_elements(graph: FunctionalGraph) -> list[int]:
    """Returns by position the elements per sample that are computed before it and used at it or later."""
    last_use: dict[int, int] = {id(tensor): len(graph.calls) for tensor in graph.outputs}
    for position, call in enumerate(graph.calls):
        for tensor in call.inputs:
            last_use[id(tensor)] = max(last_use.get(id(tensor), 0), position)
    crossing = [0] * len(graph.calls)
    for position, call in enumerate(graph.calls):
        for tensor in call.outputs:
            for later in range(position + 1, min(last_use.get(id(tensor), 0), len(graph.calls) - 1) + 1):
                crossing[later] += elements_of(tensor)
    return crossing


def _unique(items: Any) -> tuple[Any, ...]:
    return tuple({id(item): item for item in items}.values())


def named_starts(names: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """Returns where stages begin whose first layers the user has named.

    The name of a layer inside of a nested model is "model/layer". In `cuts` a nested model stands for its first layer,
    and a layer's own name is sufficient if it is unique.

    >>> named_starts(["a", "b", "c"], ["c"])
    [0, 2]
    >>> named_starts(["a", "net/b", "net/c", "d"], ["net", "c"])
    [0, 1, 2]
    """
    found = [_named(names, cut) for cut in cuts]
    unknown = [cut for cut, of_cut in zip(cuts, found, strict=True) if not of_cut]
    if unknown:
        raise ValueError(
            f"A cut names a layer that the model does not have. Received: {unknown}. Expected: names among "
            f"{list(dict.fromkeys(names))}. Layers inside of another layer cannot begin a stage."
        )
    for cut, of_cut in zip(cuts, found, strict=True):
        if len(of_cut) > 1:
            raise ValueError(
                f"A cut names several layers of nested models. Received: {cut!r}. Expected: one of {of_cut}."
            )
    starts = [0, *(names.index(of_cut[0]) for of_cut in found)]
    if any(after <= before for before, after in zip(starts, starts[1:], strict=False)):
        raise ValueError(
            f"The cuts are not in the order of the layers, or leave a stage empty. Received: cuts={list(cuts)}, at the "
            f"positions {starts[1:]}. Expected: increasing positions from 1, in the order {list(dict.fromkeys(names))}."
        )
    return starts


def _named(names: Sequence[str], cut: str) -> list[str]:
    """The first layers of what a cut may mean: a layer or nested model with this full name, or else with this name."""
    full = [name for name in names if f"{name}/".startswith(f"{cut}/")]
    if full:
        return full[:1]
    found: dict[str, str] = {}  # by the full name of a layer or nested model
    for name in names:
        before, is_in, _ = f"/{name}/".partition(f"/{cut}/")
        if is_in:
            found.setdefault(f"{before}/{cut}", name)
    return list(found.values())


_HEADINGS = ("stage", "device", "layers", "parameters", "cost", "sends/sample", "held")


def stage_table(stages: ModelStages, pipeline: Pipeline, columns: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table of the stages, whose devices are by column and stage, with the expected bubble."""
    of_calls = iter(layer_costs(stages.graph.calls, pipeline.costs))
    costs = [sum(next(of_calls) for _ in stage.calls) for stage in stages.stages]
    total = max(sum(costs), 1)
    rows = [
        [
            str(stage.index),
            " ".join(short_device(devices[stage.index]) for devices in columns),
            _layers(stage),
            format_count(_parameters(stages, stage)),
            f"{cost / total:.0%}",
            format_bytes(sum(_sent_bytes(stages, stage, tensor) for tensor in stage.outputs)),
            str(most_held(pipeline.schedule, stage.index, pipeline.stages, pipeline.micro_batches)),
        ]
        for stage, cost in zip(stages.stages, costs, strict=True)
    ]
    head, *body = align_columns([_HEADINGS, *rows], left=(0, 1, 2))
    yield from (head, "-" * max(map(len, (head, *body))), *body)
    yield (
        f"{pipeline.micro_batches} micro-batches, schedule {pipeline.schedule}: expected bubble "
        f"{pipeline.bubble_fraction:.0%} of a step if all stages take the same time"
    )


def _layers(stage: Stage) -> str:
    first, last = stage.calls[0].name, stage.calls[-1].name
    return first if len(stage.calls) == 1 else f"{first} ... {last} ({len(stage.calls)})"


def _parameters(stages: ModelStages, stage: Stage) -> int:
    owned = [variable for variable in stage.variables if stages.owner[id(variable)] == stage.index]
    return sum(int(tf.TensorShape(variable.shape).num_elements() or 0) for variable in owned)


def _sent_bytes(stages: ModelStages, stage: Stage, tensor: Any) -> int:
    """What a stage sends to others of one sample of a tensor."""
    receivers = sum(any(tensor is received for received in other.inputs) for other in stages.stages[stage.index + 1 :])
    return receivers * elements_of(tensor) * tf.as_dtype(tensor.dtype).size
