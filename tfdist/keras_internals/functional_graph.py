"""The graph of a Keras model: the calls of its layers in their order, also of a subclassed and of nested models."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfdist.keras_internals.keras_symbols import get_mask, set_mask
from tfdist.keras_internals.layer_calls import LayerCall, signature_of, with_tensors
from tfdist.private_symbols import private

Functional = private("keras.src.models.functional:Functional", "its graph of layers is cut into stages")
_unpack_singleton = private("keras.src.models.functional:unpack_singleton", "the result of a model with one output")


class DifferentInTraining(ValueError):
    """The call of a model computes something else in training than in testing."""


@dataclass(frozen=True)
class CallGraph:
    """The calls between symbolic inputs and outputs.

    Attributes:
        function: The `keras.Function`, such as a Functional model.
        trainings: The value of `training` that the code fixes for each of the `nodes`; None for that of the model.
    """

    function: Any
    trainings: tuple[bool | None, ...]

    @property
    def nodes(self) -> list[Any]:
        """Keras' nodes, in an order in which they can be computed."""
        return _nodes(self.function)


def own_graph(model: Any) -> CallGraph | None:
    """Returns the graph of a Functional or built Sequential model; None for other models."""
    model_class, function = type(model), None
    if isinstance(model, keras.Sequential) and model_class.call is keras.Sequential.call:
        function = model._functional
    elif isinstance(model, Functional) and model_class.call is Functional.call:
        function = model
    return None if not function else CallGraph(function, (None,) * len(_nodes(function)))


def traced_graph(model: Any, inputs: Any, **kwargs: Any) -> CallGraph:
    """Returns the graph of the `call` of a model, which is traced with symbolic tensors.

    `kwargs` are other arguments of `call`, without `training`.

    Raises:
        DifferentInTraining: What is computed depends on `training`, other than as an argument of layers.
        Exception: Whatever `call` raises for symbolic tensors.
    """
    functions = []
    for training in (True, False):
        symbolic_inputs = keras.tree.map_structure(
            lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype, name=leaf.name), inputs
        )
        has_training = {"training": training} if model._call_has_training_arg else {}
        functions.append(keras.Function(symbolic_inputs, model.call(symbolic_inputs, **kwargs, **has_training)))
    in_training, in_testing = functions
    if _signature(in_training) != _signature(in_testing):
        raise DifferentInTraining(f"the graphs of {model.name!r} differ")
    pairs = zip(_nodes(in_training), _nodes(in_testing), strict=True)
    return CallGraph(in_training, tuple(_fixed_training(*pair) for pair in pairs))


def _nodes(function: Any) -> list[Any]:
    by_depth = function._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in nodes if node.operation and not node.is_input]


def _signature(function: Any) -> list[Any]:
    calls = [
        LayerCall(node.operation, node.arguments.args, node.arguments.kwargs, tuple(node.outputs))
        for node in _nodes(function)
    ]
    return signature_of(function.inputs, calls, function.outputs)


def _fixed_training(in_training: Any, in_testing: Any) -> bool | None:
    """Returns the value of `training` of a call, if it is the same in training and in testing."""
    values = [node.arguments.kwargs.get("training") for node in (in_training, in_testing)]
    if values[0] is not None and values[0] == values[1]:
        return bool(values[0])
    if values not in ([None, None], [True, False]):
        raise DifferentInTraining(f"a call of {in_training.operation.name!r} has training={values[0]} in training")
    return None


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
    tensors = dict(zip(map(id, own_inputs), inputs, strict=True))
    has_own_shapes = all(own.shape == taken.shape for own, taken in zip(own_inputs, inputs, strict=True))
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
        tensors |= dict(zip(map(id, node.outputs), outputs, strict=True))
    return calls, [tensors[id(output)] for output in graph.function.outputs]


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
    arguments = keras.tree.flatten([(node.arguments.args, node.arguments.kwargs) for node in graph.nodes])
    has_variables = any(isinstance(leaf, keras.Variable) for leaf in arguments)
    if has_variables and operation.compute_dtype != operation.variable_dtype:
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


class FunctionalGraph:
    """The layer calls between the inputs and the outputs of a model, also of the layers of nested models.

    Attributes:
        calls: The calls, in an order in which they can be computed.
        inputs: The symbolic inputs.
        outputs: The symbolic outputs.
        flat_inputs: Returns the tensors of data in the order of `inputs`, with their dtypes and ranks.
    """

    def __init__(self, graph: CallGraph, flat_inputs: Callable[[Any], list[Any]]) -> None:
        self._graph = graph  # keeps the symbolic tensors alive, whose ids are used
        self.inputs: Sequence[Any] = list(graph.function.inputs)
        self.calls, outputs = flattened(graph, self.inputs)
        self.outputs: Sequence[Any] = outputs
        self.flat_inputs = flat_inputs

    def packed_outputs(self, outputs: Sequence[Any]) -> Any:
        """Returns the structure that a call of the model returns."""
        return _unpack_singleton(keras.tree.pack_sequence_as(self._graph.function._outputs_struct, list(outputs)))

    def signature(self) -> list[Any]:
        """Returns what is computed, to compare two graphs of the same model."""
        return signature_of(self.inputs, self.calls, self.outputs)


def graph_of(model: Any, x: Any = None) -> FunctionalGraph:
    """Returns the graph of a model; traces the `call` of a subclassed one.

    A built Functional or Sequential model needs no `x`, which are inputs, tensors or tensor specs.

    Raises:
        ValueError: The model has no graph; the message gives the reason.
    """
    if isinstance(model, keras.Sequential) and not model._functional and hasattr(x, "shape"):
        model.build(tuple(_batch_shape(x)))
    graph = own_graph(model)
    if graph is not None:
        return FunctionalGraph(graph, graph.function._standardize_inputs)
    if x is None:
        raise ValueError(
            f"The graph of a subclassed model is known from its first batch on. Received: {type(model).__name__} "
            f"{model.name!r} before any batch. Expected: a model that was fitted, evaluated or predicted with before."
        )
    return _traced(model, x)


def _traced(model: Any, x: Any) -> FunctionalGraph:
    inputs = keras.tree.map_structure(lambda leaf: keras.KerasTensor(_batch_shape(leaf), leaf.dtype.name), x)
    try:
        graph = traced_graph(model, inputs)
    except DifferentInTraining as error:
        raise ValueError(
            "The `call` of a subclassed model does not compute the same in training and testing. Received: "
            f"{type(model).__name__} {model.name!r}, as {error}. Expected: a `call` that uses `training` only "
            "as an argument of layers. Move the difference into a layer."
        ) from error
    except Exception as error:
        raise ValueError(
            f"The call of a subclassed model cannot be cut into stages, because it is not a graph of layers. Received: "
            f"{type(model).__name__} {model.name!r}, whose `call` failed with symbolic tensors: "
            f"{type(error).__name__}: {error}. Expected: a `call` of layers and of functions of `keras.ops` on its "
            "inputs. Move other code into layers."
        ) from error

    def standardize(data: Any) -> list[Any]:
        leaves = keras.tree.flatten(data)
        return [model.dtype_policy.convert_input(leaf, model.autocast, model.input_dtype) for leaf in leaves]

    return FunctionalGraph(graph, standardize)


def _batch_shape(leaf: Any) -> list[int | None]:
    return [None, *leaf.shape[1:]]
