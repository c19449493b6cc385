"""The calls of layers inside of a layer: which tensors each of them takes and returns, and what else uses these."""

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.layer_calls import (
    LayerCall,
    initial_scope,
    is_rematerialized,
    layers_inside,
    replaced_calls,
)


@dataclass(frozen=True)
class InnerCall:
    """A call of a layer inside of another layer.

    Attributes:
        layer: The inner layer.
        input: The tensor that it takes; None if there is none, or several.
        outputs: The tensors that it returns.
        first: The number of the first operation that it creates.
        end: The number after its last one.
    """

    layer: Any
    input: Any
    outputs: Sequence[Any]
    first: int
    end: int


@dataclass
class InnerCalls:
    """All calls inside of one call of a layer, in the order in which they end.

    Attributes:
        calls: The calls.
        values: The value of each variable in the trace, by the id of the variable.
        function: The trace that they belong to.
    """

    calls: list[InnerCall] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    function: Any = None

    def only_call_of(self, layer: Any) -> InnerCall | None:
        """Returns the call of a layer that is called once, else None."""
        calls = [call for call in self.calls if call.layer is layer]
        return calls[0] if len(calls) == 1 else None

    def owns_its_variables(self, layer: Any) -> bool:
        """Whether nothing outside of the calls of an inner layer uses its variables."""
        numbers = {operation.name: number for number, operation in enumerate(self.operations)}
        call_ranges = [range(call.first, call.end) for call in self.calls if call.layer is layer]
        values = [self.values[id(variable)] for variable in layer.variables if id(variable) in self.values]
        users = [user for value in values for user in value.consumers()]
        return all(any(numbers[user.name] in call_range for call_range in call_ranges) for user in users)

    @property
    def operations(self) -> list[Any]:
        """The operations of the trace, in the order in which they were created."""
        return list(self.function.graph.get_operations())

    @property
    def returned(self) -> list[Any]:
        """The tensors that the layer returns, and its losses. The trace returns copies of them."""
        return [operation.inputs[0] for operation in self.operations if operation.name.startswith("returned")]


def inner_calls(call: LayerCall, *, training: bool, of_any_width: Sequence[Any] = ()) -> InnerCalls | None:
    """Traces a call of a layer on complete values, apart from everything else.

    Layers `of_any_width` have results with a last axis of unknown size, so that nothing can depend on it. Returns None
    if the layer has no inner layers, calls them within a condition or a loop, or cannot be traced alone.
    """
    layers = layers_inside(call.operation) if isinstance(call.operation, keras.layers.Layer) else []
    if not layers or any(map(is_rematerialized, (call.operation, *layers))):
        return None
    traced_calls = InnerCalls()
    tensors, variables = list(call.inputs), call.variables
    specs = [tf.TensorSpec(argument.shape, argument.dtype) for argument in (*tensors, *variables)]

    def traced(*function_inputs: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        values = {id(symbolic): tensor for symbolic, tensor in zip(tensors, function_inputs, strict=False)}
        variable_values = function_inputs[len(tensors) :]
        traced_calls.values = dict(zip(map(id, variables), variable_values, strict=True))
        recorded = {layer: _recorded(layer, traced_calls, graph, of_any_width) for layer in layers}
        with initial_scope(variables, variable_values) as scope, replaced_calls(recorded):
            results = [*call(values, training=training), *scope.losses]
        return [tf.identity(tf.convert_to_tensor(result), name="returned") for result in results]

    def trace() -> Any:
        with tf.init_scope(), tf.device(None):
            return tf.function(traced, autograph=False).get_concrete_function(*specs)

    try:
        traced_calls.function = contextvars.Context().run(trace)  # without the losses of a step
    except Exception:  # Whatever a layer raises, it can be computed as a whole.
        return None
    return None if any(inner.first < 0 for inner in traced_calls.calls) else traced_calls


def _recorded(layer: Any, traced_calls: InnerCalls, graph: Any, of_any_width: Sequence[Any]) -> Callable[..., Any]:
    call = type(layer).call.__get__(layer)
    is_any_width = any(layer is wide_layer for wide_layer in of_any_width)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        is_inside = tf.compat.v1.get_default_graph() is graph
        first = len(graph.get_operations()) if is_inside else -1
        result = call(*args, **kwargs)
        if is_any_width:
            result = tf.raw_ops.PlaceholderWithDefault(input=result, shape=[*result.shape[:-1], None])
        leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if tf.is_tensor(leaf)]
        outputs = [leaf for leaf in keras.tree.flatten(result) if tf.is_tensor(leaf)]
        layer_input = leaves[0] if len(leaves) == 1 else None
        traced_calls.calls.append(InnerCall(layer, layer_input, outputs, first, len(graph.get_operations())))
        return result

    return recorded
