"""Keras' layers: what they keep without a public name, calls in the graph of a model and inside of a layer."""

import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist.private_symbols import private

# The attributes of a layer's instance exist since Keras 3.10; they cannot be looked up in its class.


def kernel_of(layer: Any) -> keras.Variable:
    """Returns the variable of the kernel of a Dense or EinsumDense, whose `kernel` is a value that LoRA may change."""
    return layer._kernel


def table_of(embedding: Any) -> keras.Variable:
    """Returns the variable of an embedding's table, whose `embeddings` is a value that LoRA may change."""
    return embedding._embeddings


def projections_of(attention: Any) -> list[Any]:
    """Returns the layers of an attention whose results have an axis of heads: query, key, value and, if any, gate."""
    names = ("_query_dense", "_key_dense", "_value_dense", "_gate_dense")
    return [vars(attention)[name] for name in names if name in vars(attention)]


def output_projection_of(attention: Any) -> Any:
    """Returns the layer of an attention that joins the heads."""
    return attention._output_dense


def dropout_of(attention: Any) -> Any:
    """Returns the layer that drops scores of an attention."""
    return attention._dropout_layer


def is_rematerialized(layer: Any) -> bool:
    """Whether a layer is computed again in the backward pass."""
    return bool(getattr(layer, "_remat_mode", None))


def layers_inside(layer: Any) -> list[Any]:
    """Returns the layers inside of a layer, also those inside of these, without the layer itself."""
    return list(layer._flatten_layers(include_self=False))


_operation_fn = private("keras.src.models.functional:operation_fn", "passes `training` to a layer, as a model does")


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer or operation.

    Attributes:
        operation: The layer or `keras.Operation`.
        args: Its positional arguments, a structure in which the tensors are symbolic.
        kwargs: Its keyword arguments, a structure in which the tensors are symbolic.
        outputs: The symbolic tensors that it returns.
        path: The names of the models around it, each followed by "/"; empty for a layer of the model itself.
        training: The value of `training` that the code of a model fixes, or None for that of the step.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    path: str = ""
    training: bool | None = None

    @property
    def name(self) -> str:
        """The name of the layer or operation after those of the models around it: "backbone/dense"."""
        return f"{self.path}{self.operation.name}"

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The symbolic tensors that it takes."""
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, keras.KerasTensor))

    def __call__(self, values: Mapping[int, Any], *, training: bool) -> list[Any]:
        """Computes the outputs from `values`, which maps the ids of symbolic tensors to tensors."""
        args, kwargs = with_tensors((self.args, self.kwargs), values)
        training_of_call = training if self.training is None else self.training
        return list(keras.tree.flatten(_operation_fn(self.operation, training=training_of_call)(*args, **kwargs)))

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that the call may use: those of the layer, of its metrics, and those among its arguments."""
        operation = self.operation
        candidates = list(getattr(operation, "variables", ())) + list(getattr(operation, "metrics_variables", ()))
        candidates += [leaf for leaf in self._leaves if isinstance(leaf, keras.Variable)]
        return list({id(variable): variable for variable in candidates}.values())

    @property
    def _leaves(self) -> list[Any]:
        return list(keras.tree.flatten((self.args, self.kwargs)))


def with_tensors(structure: Any, values: Mapping[int, Any]) -> Any:
    """Returns a structure whose symbolic tensors are replaced by `values`, a mapping from their ids."""
    return keras.tree.map_structure(
        lambda leaf: values[id(leaf)] if isinstance(leaf, keras.KerasTensor) else leaf, structure
    )


def refilled(structure: Any, is_replaced: Callable[[Any], bool], values: Iterable[Any]) -> Any:
    """Returns a structure with `values`, in their order, in place of the leaves for which `is_replaced` is true."""
    remaining = iter(values)
    return keras.tree.map_structure(lambda leaf: next(remaining) if is_replaced(leaf) else leaf, structure)


def signature_of(inputs: Sequence[Any], calls: Sequence[LayerCall], outputs: Sequence[Any]) -> list[Any]:
    """Returns what calls compute, without `training` among their arguments, to compare two graphs of the same model."""
    numbers = {id(tensor): f"input {number}" for number, tensor in enumerate(inputs)}
    result: list[Any] = []
    for index, call in enumerate(calls):
        for number, tensor in enumerate(call.outputs):
            numbers[id(tensor)] = f"output {number} of {index}"
        kwargs = {name: value for name, value in call.kwargs.items() if name != "training"}
        arguments = keras.tree.map_structure(
            lambda leaf: numbers.get(id(leaf), "") or _shown(leaf), (call.args, kwargs)
        )
        is_layer = isinstance(call.operation, keras.layers.Layer)
        identity = id(call.operation) if is_layer else _constants(call.operation)
        result.append((type(call.operation).__name__, identity, call.training, repr(arguments)))
    return [*result, [numbers.get(id(tensor)) for tensor in outputs]]


def _constants(operation: Any) -> str:
    plain = (bool, int, float, str, tuple, list, type(None))
    attributes = {name: value for name, value in vars(operation).items() if name != "name" and not name.startswith("_")}
    return repr(sorted((name, repr(value)) for name, value in attributes.items() if isinstance(value, plain)))


def _shown(leaf: Any) -> Any:
    return id(leaf) if isinstance(leaf, keras.Variable) else repr(leaf)


@contextmanager
def replaced_calls(calls: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """In the body, each layer of `calls` computes by the given function, not its `call`, for inputs of any shape."""
    specs = {layer: layer.input_spec for layer in calls}
    try:
        for layer, call in calls.items():
            # Keras forbids `setattr` for built layers.
            vars(layer).update(call=call, _input_spec=None)
        yield
    finally:
        for layer, spec in specs.items():
            vars(layer).pop("call", None)
            vars(layer)["_input_spec"] = spec


def initial_scope(variables: Any, values: Any) -> Any:
    """Returns a `keras.StatelessScope` in which variables have values, also of other shapes, such as parts of them.

    It collects losses.
    """
    scope = keras.StatelessScope(collect_losses=True)  # whose argument takes no other shapes
    scope.state_mapping = {id(variable): value for variable, value in zip(variables, values, strict=True)}
    return scope


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
