"""Layers that contain layers, such as a block of a transformer: their inner layers compute on parts of variables.

The code of such a layer is not known. So what its inner layers return is whole, except where a trace shows that nothing
but layers that take parts uses it: the hidden values between a Dense that is split by columns and one split by rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras

from tfdist.keras_internals.inner_calls import InnerCalls, inner_calls
from tfdist.keras_internals.layer_attributes import is_rematerialized, kernel_of, layers_inside, output_projection_of
from tfdist.keras_internals.layer_calls import LayerCall
from tfdist.model_parallel.sharded_layers import (
    aware_layers,
    drops_parts,
    is_attention,
    is_elementwise,
)


@dataclass(frozen=True)
class AwareLayers:
    """The layers of a layer call that compute on parts of variables.

    Attributes:
        layers: The layers themselves.
        whole: Those that must return whole values, by id.
        dropouts: Dropout layers whose inputs are split along the last axis.
    """

    layers: list[Any] = field(default_factory=list)
    whole: frozenset[int] = frozenset()
    dropouts: list[Any] = field(default_factory=list)

    @property
    def variables(self) -> set[int]:
        """The ids of their variables, without those of an activation that is a layer."""
        inside = [one for layer in self.layers for one in layers_inside(layer)]
        of_inside = {id(one) for layer in inside for one in layer.variables}
        return {id(one) for layer in self.layers for one in layer.variables} - of_inside


def aware_layers_of(call: LayerCall, axes: Mapping[int, int], *, training: bool) -> AwareLayers:
    """Returns the layers of a layer call that compute on parts of variables, also those inside of its layer.

    Args:
        call: A layer call of a model.
        axes: By the id of a split variable its axis.
        training: As in the call of a layer.
    """
    own = list(aware_layers(call.operation, axes))
    if own or not any(id(variable) in axes for variable in call.variables):
        return AwareLayers(own)
    if any(map(is_rematerialized, [call.operation, *layers_inside(call.operation)])):
        return AwareLayers()  # what is computed again exchanges nothing
    inner = inner_calls(call, training=training)
    if inner is None:
        return AwareLayers()
    layers, outermost = [], list(_outermost(inner))
    for layer in outermost:
        if type(layer) is not keras.layers.EinsumDense and _returns_whole_values(inner, layer, axes):
            layers += [one for one in aware_layers(layer, axes) if is_attention(layer) or one is layer]
    own_dense = [one for one in outermost if type(one) is keras.layers.Dense and any(one is known for known in layers)]
    kept, dropouts = _kept(inner, own_dense, axes)
    if kept and kept != _kept(inner_calls(call, training=training, of_any_width=kept), kept, axes)[0]:
        kept, dropouts = [], []  # something depends on the width of their results
    whole = frozenset(id(layer) for layer in outermost if not any(layer is one for one in kept))
    return AwareLayers(layers, whole, dropouts)


def _kept(inner: InnerCalls | None, layers: list[Any], axes: Mapping[int, int]) -> tuple[list[Any], list[Any]]:
    """Returns the Dense layers whose results stay split, and the Dropout layers that take them."""
    kept: list[Any] = []
    dropouts: list[Any] = []
    for layer in layers:
        pair = None if inner is None else rows_after(inner, layer)
        if pair is not None and all(axes.get(id(kernel_of(one))) == 0 for one in pair[0]):
            kept.append(layer)
            dropouts += pair[1]
    return kept, dropouts


def _returns_whole_values(inner: InnerCalls, layer: Any, axes: Mapping[int, int]) -> bool:
    """Whether attention returns no scores, which are split by heads, and its last layer is not split by columns."""
    if not is_attention(layer):
        return True
    kernel = kernel_of(output_projection_of(layer))
    has_scores = any(len(one.outputs) != 1 for one in inner.calls if one.layer is layer)
    return not has_scores and axes.get(id(kernel), 0) < 2


def rows_after(inner: InnerCalls, layer: Any) -> tuple[list[Any], list[Any]] | None:
    """Returns the Dense layers that alone use what a Dense layer returns, and the Dropout layers between them.

    Args:
        inner: The calls inside of a layer.
        layer: An inner Dense layer.

    Returns:
        None if anything else uses it, or if one of these layers is called several times.
    """
    own = inner.only_call_of(layer)
    found = None if own is None or len(own.outputs) != 1 else inner.reached(own.outputs[0], _passes)
    if found is None:
        return None
    ends, passed = found
    is_known = all(type(one) is keras.layers.Dense and inner.only_call_of(one) for one in ends)
    return (ends, [one for one in passed if drops_parts(one)]) if is_known else None


def _passes(layer: Any) -> bool:
    return is_elementwise(layer) or drops_parts(layer)


def _outermost(inner: InnerCalls) -> Iterator[Any]:
    """Yields the inner layers once, without those inside of attention, and those whose variables other code uses."""
    layers = {id(one.layer): one.layer for one in inner.calls}
    inside = {id(one) for layer in layers.values() if is_attention(layer) for one in layers_inside(layer)}
    yield from (layer for key, layer in layers.items() if key not in inside and inner.owns_its_variables(layer))


def inner_layers_of(inner: InnerCalls) -> list[Any]:
    """Returns the layers inside of a layer that a layout may split, without those inside of attention."""
    return list(_outermost(inner))
