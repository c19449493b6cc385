"""auto_layout: the layout of Megatron-LM (Shoeybi et al. 2019) for the layers of a model."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.keras_internals.functional_graph import graph_of
from tfdist.keras_internals.layer_calls import (
    LayerCall,
    kernel_of,
    output_projection_of,
    projections_of,
    table_of,
)
from tfdist.tensor_parallel.composite_layers import InnerCalls, hidden_values_of, inner_calls, inner_layers_of
from tfdist.tensor_parallel.sharded_layers import (
    aware_layers,
    drops_parts,
    is_attention,
    is_dense,
    is_elementwise,
    is_embedding,
    is_reversible,
)
from tfdist.tensor_parallel.split_variable import part_size
from tfdist.utils.argument_checks import check_whole_number

_AXIS = "model"
_Layouts = dict[int, tuple[str | None, ...]]


def auto_layout(model: Any, ways: int) -> Any:
    """Returns a layout that splits a model over the devices of a stage, with one sum for each pair of layers.

    Dense layers are split by columns and, where only elementwise layers lie between, the next one by rows; attention by
    heads; an `Embedding` or `ReversibleEmbedding` by words; the Dense layer that returns the output of a model by
    columns, if it is wider than its input, as that of a vocabulary. Layers inside of a layer, such as a block of a
    transformer, are split likewise, also gated ones. What is not divisible by `ways` stays whole, except vocabularies,
    whose last part is padded, and so do other layers.

    The layout has the paths of the variables of `model`. A model that is built again has the same paths if its layers
    have names, or after `keras.utils.clear_session()`.

    Args:
        model: A built Functional or Sequential model, or a subclassed one after its first batch.
        ways: The number of devices of a stage.

    Returns:
        A `keras.distribution.LayoutMap`, for `ModelParallelStrategy(layout_map=...)`.

    Raises:
        ValueError: The model has no graph yet, or `ways` is not a whole number from 1 on.

    >>> x = keras.Input((8,))
    >>> hidden = keras.layers.Dense(32, "gelu", name="up")(x)
    >>> layout_map = auto_layout(keras.Model(x, keras.layers.Dense(8, name="down")(hidden)), ways=2)
    >>> {path: layout_map[path].axes for path in layout_map}
    {'up/kernel': (None, 'model'), 'up/bias': ('model',), 'down/kernel': ('model', None)}
    """
    check_whole_number("ways", ways, at_least=1)
    graph = graph_of(model)
    numbers = Counter(id(call.operation) for call in graph.calls)
    once = [call for call in graph.calls if numbers[id(call.operation)] == 1]
    layouts: _Layouts = {}
    consumers: dict[int, list[LayerCall]] = defaultdict(list)
    for call in graph.calls:
        for tensor in call.inputs:
            consumers[id(tensor)].append(call)
    makers = {id(tensor): call for call in once for tensor in call.outputs}
    returned = {id(tensor) for tensor in graph.outputs}
    for layer in {id(call.operation): call.operation for call in graph.calls if is_embedding(call.operation)}.values():
        if numbers[id(layer)] == 1 or is_reversible(layer):
            layouts |= _words(layer, ways)
    for call in once:
        layer = call.operation
        if is_attention(layer):
            layouts |= _heads(layer, ways)
        elif not _is_dense(layer) and (inner := inner_calls(call, training=True)) is not None:
            layouts |= _inner_layouts(inner, ways)
        elif _is_dense(layer) and kernel_of(layer).shape[0] % ways == 0:
            columns = _columns_before(call, makers, consumers, returned)
            if columns and all(id(kernel_of(dense)) not in layouts and _units(dense) % ways == 0 for dense in columns):
                layouts |= _by_columns(*columns)
                layouts[id(kernel_of(layer))] = (_AXIS, None)
    for call in once:
        layer = call.operation
        if _is_dense(layer) and id(kernel_of(layer)) not in layouts and id(call.outputs[0]) in returned:
            if _pads_little(_units(layer), ways) and _units(layer) > kernel_of(layer).shape[0]:
                layouts |= _by_columns(layer)
    mesh = keras.distribution.DeviceMesh((1, ways), ["batch", _AXIS], devices=[str(rank) for rank in range(ways)])
    layout_map = keras.distribution.LayoutMap(mesh)
    variables = [variable for call in graph.calls for variable in call.variables if id(variable) in layouts]
    for path, axes in {variable.path: layouts[id(variable)] for variable in variables}.items():
        layout_map[path] = axes
    return layout_map


def _inner_layouts(inner: InnerCalls, ways: int) -> _Layouts:
    """Returns the layouts of the layers inside of a layer, such as a block of a transformer."""
    layouts: _Layouts = {}
    layers = [layer for layer in inner_layers_of(inner) if inner.only_call_of(layer) is not None]
    for layer in layers:
        if is_attention(layer):
            layouts |= _heads(layer, ways)
        elif is_embedding(layer):
            layouts |= _words(layer, ways)
        elif _is_dense(layer) and (hidden := hidden_values_of(inner, layer)) is not None:
            both = (*hidden.columns, *hidden.rows)
            is_new = not any(id(kernel_of(dense)) in layouts for dense in both) and all(map(_is_dense, both))
            if is_new and _units(layer) % ways == 0:
                layouts |= _by_columns(*hidden.columns)
                layouts |= {id(kernel_of(dense)): (_AXIS, None) for dense in hidden.rows}
    return layouts


def _pads_little(size: int, ways: int) -> bool:
    """Whether equal parts of a vocabulary take at most a twentieth more than the vocabulary."""
    return part_size(size, ways) * ways <= 1.05 * size


def _words(layer: Any, ways: int) -> _Layouts:
    if not _pads_little(layer.input_dim, ways) or not list(aware_layers(layer, {})):
        return {}
    found: _Layouts = {id(table_of(layer)): (_AXIS, None)}
    is_tied = getattr(layer, "tie_weights", True)
    return found if is_tied else {**found, id(layer.reverse_embeddings): (None, _AXIS)}


def _is_dense(layer: Any) -> bool:
    return is_dense(layer) and bool(list(aware_layers(layer, {})))


def _units(layer: Any) -> int:
    return int(kernel_of(layer).shape[1])


def _by_columns(*layers: Any) -> _Layouts:
    found: _Layouts = {id(kernel_of(layer)): (None, _AXIS) for layer in layers}
    return found | {id(layer.bias): (_AXIS,) for layer in layers if layer.bias is not None}


def _heads(layer: Any, ways: int) -> _Layouts:
    projections = projections_of(layer)
    axes = {id(kernel_of(projection)): 1 for projection in projections}
    if any(kernel_of(projection).shape[1] % ways for projection in projections) or not list(aware_layers(layer, axes)):
        return {}
    found: _Layouts = {id(kernel_of(projection)): (None, _AXIS, None) for projection in projections}
    found |= {id(projection.bias): (_AXIS, None) for projection in projections if projection.bias is not None}
    kernel = kernel_of(output_projection_of(layer))
    return {**found, id(kernel): (_AXIS, *[None] * (len(kernel.shape) - 1))}


def _columns_before(
    call: LayerCall, makers: dict[int, LayerCall], consumers: dict[int, list[LayerCall]], returned: set[int]
) -> Sequence[Any]:
    """Returns the Dense layers whose results reach a call through elementwise layers, and no other; or none."""
    found, waiting = [], list(call.inputs)
    while waiting:
        tensor = waiting.pop()
        maker = makers.get(id(tensor))
        if maker is None or id(tensor) in returned or len(consumers[id(tensor)]) > 1:
            return []
        if _is_dense(maker.operation):
            found.append(maker.operation)
        elif is_elementwise(maker.operation) or drops_parts(maker.operation):
            waiting += maker.inputs
        else:
            return []
    return found
