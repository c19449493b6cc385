"""Replaces the `call` of layers while a function is traced. Keras' `__call__` around it (casts, masks) stays."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras


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
    pairs = list(zip(variables, values, strict=True))
    equal = [
        (keras_variable, value) for keras_variable, value in pairs if tuple(keras_variable.shape) == tuple(value.shape)
    ]
    scope = keras.StatelessScope(equal, collect_losses=True)
    for variable, value in pairs:
        if tuple(variable.shape) != tuple(value.shape):
            scope.add_update((variable, value))
    return scope
