"""Keras' layers: what they keep without a public name, a call in the graph of a model, and calls that are replaced."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

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
