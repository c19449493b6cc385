"""The graph of a Keras model: the calls of its layers in their order, also of a subclassed model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import tree
from tfdist.private_symbols import private

_Functional = private("keras.src.models.functional:Functional", "its graph of layers is cut into stages")
_operation_fn = private("keras.src.models.functional:operation_fn", "passes `training` to a layer, as a model does")
_unpack_singleton = private("keras.src.models.functional:unpack_singleton", "the result of a model with one output")
private("keras.src.models.functional:Functional._standardize_inputs", "matches the data with the inputs of the graph")


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer or operation.

    Attributes:
        operation: The layer or `keras.Operation`.
        inputs: The symbolic tensors that it takes.
        outputs: The symbolic tensors that it returns.
        node: Keras' node.
    """

    operation: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    node: Any

    @property
    def name(self) -> str:
        """The name of the layer or operation."""
        return str(self.operation.name)

    def __call__(self, values: Mapping[int, Any], *, training: bool) -> list[Any]:
        """Computes the outputs from `values`, which maps the ids of symbolic tensors to tensors."""
        args, kwargs = self.node.arguments.fill_in(values)
        return list(tree.flatten(_operation_fn(self.operation, training=training)(*args, **kwargs)))

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that the call may use: those of the layer, of its metrics, and those among its arguments."""
        node, operation = self.node, self.operation
        found = list(getattr(operation, "variables", ())) + list(getattr(operation, "metrics_variables", ()))
        arguments = tree.flatten((node.arguments.args, node.arguments.kwargs))
        found += [argument for argument in arguments if isinstance(argument, keras.Variable)]
        return list({id(variable): variable for variable in found}.values())


class FunctionalGraph:
    """The layer calls between the inputs and the outputs of a model.

    Attributes:
        calls: In an order in which they can be computed.
        inputs: The symbolic inputs.
        outputs: The symbolic outputs.
        is_traced: Whether the graph is that of one call of a subclassed model.
    """

    def __init__(self, function: Any, standardize: Callable[[Any], list[Any]], *, is_traced: bool = False) -> None:
        self.function = function  # keeps the symbolic tensors alive, whose ids are used
        self.inputs: Sequence[Any] = list(function.inputs)
        self.outputs: Sequence[Any] = list(function.outputs)
        self.calls = [
            LayerCall(node.operation, tuple(node.input_tensors), tuple(node.outputs), node)
            for depth in sorted(function._nodes_by_depth, reverse=True)
            for node in function._nodes_by_depth[depth]
            if node.operation and not node.is_input
        ]
        self._standardize, self.is_traced = standardize, is_traced

    def flat_inputs(self, x: Any) -> list[tf.Tensor]:
        """Returns the tensors of the data `x` in the order of `inputs`, with their dtypes and ranks."""
        return self._standardize(x)

    def packed_outputs(self, outputs: Sequence[Any]) -> Any:
        """Returns the structure that a call of the model returns."""
        return _unpack_singleton(tree.pack_sequence_as(self.function._outputs_struct, list(outputs)))

    def signature(self) -> list[Any]:
        """Returns what is computed, without `training`, to compare two traces of the same model."""
        numbers = {id(tensor): f"input {number}" for number, tensor in enumerate(self.inputs)}
        result: list[Any] = []
        for index, call in enumerate(self.calls):
            for number, tensor in enumerate(call.outputs):
                numbers[id(tensor)] = f"output {number} of {index}"
            kwargs = {name: value for name, value in call.node.arguments.kwargs.items() if name != "training"}
            arguments = tree.map_structure(
                lambda leaf: numbers.get(id(leaf), "") or _shown(leaf), (call.node.arguments.args, kwargs)
            )
            is_layer = isinstance(call.operation, keras.layers.Layer)
            own = id(call.operation) if is_layer else _constants(call.operation)
            result.append((type(call.operation).__name__, own, repr(arguments)))
        return [*result, [numbers.get(id(tensor)) for tensor in self.outputs]]


def graph_of(model: Any, x: Any = None, *, training: bool = True) -> FunctionalGraph:
    """Returns the graph of a model; traces the `call` of a subclassed one.

    Args:
        model: A Functional, Sequential or subclassed model.
        x: Its inputs, tensors or tensor specs; may be None for a built Functional or Sequential model.
        training: Whether the call of a subclassed model is traced for training.

    Raises:
        ValueError: The model has no graph; the message gives the reason.
    """
    own = type(model)
    if isinstance(model, keras.Sequential) and own.call is keras.Sequential.call:
        if not model._functional and x is not None:
            model.build(tuple(_batch_shape(x)) if hasattr(x, "shape") else None)
        if model._functional:
            return FunctionalGraph(model._functional, model._functional._standardize_inputs)
    elif isinstance(model, _Functional) and own.call is _Functional.call:
        return FunctionalGraph(model, model._standardize_inputs)
    return _traced(model, x, training)


def _traced(model: Any, x: Any, training: bool) -> FunctionalGraph:
    if x is None:
        raise ValueError(
            f"The graph of a subclassed model is known from its first batch on. Received: {type(model).__name__} "
            f"{model.name!r} before any batch. Expected: a model that was fitted, evaluated or predicted with before."
        )
    inputs = tree.map_structure(lambda leaf: keras.KerasTensor(_batch_shape(leaf), leaf.dtype.name), x)
    kwargs = {"training": training} if model._call_has_training_arg else {}
    try:
        outputs = model.call(inputs, **kwargs)
        function = keras.Function(inputs, outputs)
    except Exception as error:
        raise ValueError(
            f"The call of a subclassed model cannot be cut into stages, because it is not a graph of layers. Received: "
            f"{type(model).__name__} {model.name!r}, whose `call` failed with symbolic tensors: "
            f"{type(error).__name__}: {error}. Expected: a `call` of layers and of functions of `keras.ops` on its "
            "inputs. Move other code into layers."
        ) from error

    def standardize(data: Any) -> list[Any]:
        return [_converted(model, leaf) for leaf in tree.flatten(data)]

    return FunctionalGraph(function, standardize, is_traced=True)


def _converted(model: Any, leaf: Any) -> Any:
    return model.dtype_policy.convert_input(leaf, model.autocast, model.input_dtype)


def _batch_shape(leaf: Any) -> list[int | None]:
    return [None, *leaf.shape[1:]]


def _constants(operation: Any) -> str:
    plain = (bool, int, float, str, tuple, list, type(None))
    own = {name: value for name, value in vars(operation).items() if name != "name" and not name.startswith("_")}
    return repr(sorted((name, repr(value)) for name, value in own.items() if isinstance(value, plain)))


def _shown(leaf: Any) -> Any:
    return id(leaf) if isinstance(leaf, keras.Variable) else repr(leaf)
