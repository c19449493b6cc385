"""The costs of layer calls, by which a model is cut: given, or estimated from weights and outputs."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import keras

from tfdist.keras_internals.layer_calls import LayerCall

_RESOLUTION = 10**6  # a cost counts in millionths of the sum


def layer_costs(calls: Sequence[LayerCall], given: Mapping[str, float] | None) -> list[int]:
    """Returns by call its cost, on any scale.

    Args:
        calls: The layer calls of a model.
        given: By the name of a layer the cost of each of its calls; other layers cost nothing. None: estimated.

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
