"""The calls of the layers inside of nested models, which take the place of the calls of these models."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.keras_internals.call_graph import CallGraph, own_graph, traced_graph
from tfdist.keras_internals.keras_symbols import get_mask, set_mask
from tfdist.keras_internals.layer_calls import LayerCall, with_tensors


def flattened(
    graph: CallGraph, inputs: Sequence[Any], path: str = "", training: bool | None = None
) -> tuple[list[LayerCall], list[Any]]:
    """Returns the calls of a graph in an order in which they can be computed, and its outputs.

    The call of a Functional or Sequential model, or of a subclassed one whose `call` is a graph of layers, is replaced
    by the calls of its layers. Models that pass masks or other arguments on stay whole.

    `inputs`, symbolic tensors, take the place of its inputs. `path` are the names of the models around it, each
    followed by "/", `training` is the value that the code around it fixes; None for that of the step.
    """
    own_inputs = graph.function.inputs
    tensors = {id(inner_tensor): outer_tensor for inner_tensor, outer_tensor in zip(own_inputs, inputs, strict=True)}
    has_own_shapes = all(
        inner_tensor.shape == outer_tensor.shape for inner_tensor, outer_tensor in zip(own_inputs, inputs, strict=True)
    )
    calls: list[LayerCall] = []
    for node, fixed in zip(graph.nodes, graph.trainings, strict=True):
        args, kwargs = with_tensors((node.arguments.args, node.arguments.kwargs), tensors)
        own_training = training if fixed is None else fixed
        inner = _calls_inside(node.operation, args, kwargs, f"{path}{node.operation.name}/", own_training)
        if inner is None:
            outputs = list(node.outputs)
            if path:  # a nested model may be called several times
                spec = outputs if has_own_shapes else node.operation.compute_output_spec(*args, **kwargs)
                outputs = [_like(output_spec) for output_spec in keras.tree.flatten(spec)]
            calls.append(LayerCall(node.operation, args, kwargs, tuple(outputs), path, own_training))
        else:
            inner_calls, outputs = inner
            calls += inner_calls
        tensors |= {
            id(inner_tensor): outer_tensor for inner_tensor, outer_tensor in zip(node.outputs, outputs, strict=True)
        }
    return calls, [tensors[id(inner_tensor)] for inner_tensor in graph.function.outputs]


def _calls_inside(
    operation: Any, args: Any, kwargs: Any, path: str, training: bool | None
) -> tuple[list[LayerCall], list[Any]] | None:
    """Returns the calls of the layers of a nested model, and its outputs; None for a layer or if it stays whole."""
    if not isinstance(operation, keras.Model) or len(args) != 1 or set(kwargs) - {"training", "mask"}:
        return None
    has_own_rules = operation.supports_masking or operation.activity_regularizer is not None
    if has_own_rules or type(operation).__call__ is not keras.Model.__call__:
        return None
    graph = own_graph(operation)
    inputs = list(keras.tree.flatten(args[0])) if graph is None else _in_order(graph.function, args[0])
    if not inputs or not all(isinstance(leaf, keras.KerasTensor) for leaf in inputs):
        return None
    conversions: list[LayerCall] = []
    if operation._convert_input_args:
        inputs = [
            _converted(tensor, _cast_to(operation, tensor), len(tensor.shape), path, conversions) for tensor in inputs
        ]
    if graph is None:
        graph = _traced_inside(operation, keras.tree.pack_sequence_as(args[0], inputs))
        if graph is None:
            return None
    elif len(inputs) != len(graph.function.inputs) or any(tensor.sparse for tensor in graph.function.inputs):
        return None
    else:
        pairs = zip(inputs, graph.function.inputs, strict=True)
        inputs = [
            _converted(tensor, expected_input.dtype, len(expected_input.shape), path, conversions)
            for tensor, expected_input in pairs
        ]
        masks = [] if kwargs.get("mask") is None else keras.tree.flatten(kwargs["mask"])
        inputs = [_masked(*pair, path, conversions) for pair in itertools.zip_longest(inputs, masks)]
    if graph.variables and operation.compute_dtype != operation.variable_dtype:
        return None  # the call of the model casts variables that its operations take
    if operation._remat_mode and not all(node.operation._remat_mode for node in graph.nodes):
        return None  # the model is rematerialized as a whole
    calls, outputs = flattened(graph, inputs, path, training)
    return conversions + calls, outputs


def _traced_inside(model: Any, inputs: Any) -> CallGraph | None:
    """Returns the graph of a nested subclassed model; None if it has none, or changes variables itself."""
    if model._call_has_mask_arg:  # Its layers would get the mask.
        return None
    try:
        with keras.StatelessScope() as scope:
            graph = traced_graph(model, inputs)
    except Exception:  # Its code expects tensors, and may raise anything. The call of the whole model is traced later.
        return None
    return None if scope.state_mapping else graph


def _in_order(function: Any, argument: Any) -> list[Any]:
    """Returns the tensors of an argument in the order of the inputs, as a Functional model takes them."""
    struct = function._inputs_struct
    if isinstance(argument, dict) and not isinstance(struct, dict):
        argument = [argument.get(expected_input.name) for expected_input in keras.tree.flatten(struct)]
    return list(keras.tree.flatten(argument))


def _cast_to(model: Any, tensor: Any) -> str:
    """Returns the dtype to which the call of a layer casts a tensor first."""
    is_cast = model.autocast and all("float" in str(dtype) for dtype in (tensor.dtype, model.input_dtype))
    return str(model.input_dtype if is_cast else tensor.dtype)


def _like(tensor: Any) -> Any:
    return keras.KerasTensor(tensor.shape, tensor.dtype, sparse=tensor.sparse, name=tensor.name)


class InputConversion(keras.Operation):
    """Converts an input of a nested model as its call does.

    Attributes:
        dtype: The dtype of the result.
        rank: The rank of the result: an axis of length 1 at the end is added or removed.
    """

    def __init__(self, dtype: str, rank: int) -> None:
        """Creates the conversion."""
        super().__init__(name="input_conversion")
        self.dtype, self.rank = dtype, rank

    def call(self, x: Any, mask: Any = None) -> Any:
        """Converts a tensor. It keeps its mask, or gets another one."""
        mask = get_mask(x) if mask is None else mask
        x = keras.ops.cast(x, self.dtype)
        if len(x.shape) != self.rank:
            x = keras.ops.squeeze(x, -1) if len(x.shape) > self.rank else keras.ops.expand_dims(x, -1)
        if mask is not None:
            set_mask(x, mask)
        return x

    def compute_output_spec(self, x: Any, mask: Any = None) -> Any:
        """Returns the symbolic result."""
        del mask
        shape = x.shape if len(x.shape) == self.rank else x.shape[:-1] if len(x.shape) > self.rank else (*x.shape, 1)
        return keras.KerasTensor(shape, self.dtype)


def _converted(tensor: Any, dtype: str, rank: int, path: str, calls: list[LayerCall]) -> Any:
    """Returns a tensor of a dtype and rank. If it has others, appends the call that converts it."""
    if tensor.dtype == dtype and len(tensor.shape) == rank:
        return tensor
    return _called(InputConversion(dtype, rank), (tensor,), path, calls)


def _masked(tensor: Any, mask: Any, path: str, calls: list[LayerCall]) -> Any:
    """Returns a tensor with a symbolic mask. If there is one, appends the call that sets it."""
    if mask is None:
        return tensor
    return _called(InputConversion(tensor.dtype, len(tensor.shape)), (tensor, mask), path, calls)


def _called(operation: Any, args: tuple[Any, ...], path: str, calls: list[LayerCall]) -> Any:
    result = operation.compute_output_spec(*args)
    calls.append(LayerCall(operation, args, {}, (result,), path))
    return result
