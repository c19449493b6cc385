"""Creates the `tf.Variable` behind a Keras variable in another way, from the initializer of the variable."""

import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfdist.keras_internals.keras_symbols import Variable
from tfdist.keras_internals.placed_variables import hold

_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)


@dataclass(frozen=True)
class NewValue:
    """What is known of a variable that is being created.

    Attributes:
        path: The path of the Keras variable.
        shape: Its shape.
        value: Takes a shape and returns the initial value.
        is_constant: Whether all elements of it are equal.
        options: `dtype`, `name`, `trainable`, `aggregation` and `synchronization` of the `tf.Variable`.
    """

    path: str
    shape: tuple[int, ...]
    value: Callable[[Sequence[int]], Any]
    is_constant: bool
    options: dict[str, Any]


def patch_creation_from_initializers(create: Callable[[NewValue], Any]) -> None:
    """Lets `create` return what holds the value of a new Keras variable, or None to create it as Keras does."""
    stock = Variable._initialize_with_initializer

    @functools.wraps(stock)
    def initialize(self: Any, initializer: Any) -> None:
        held = create(_described(self, initializer))
        if held is None:
            stock(self, initializer)
        else:
            hold(self, held)

    Variable._initialize_with_initializer = initialize


def _described(variable: Any, initializer: Any) -> NewValue:
    is_constant = type(initializer) in _CONSTANTS
    if type(initializer) is keras.initializers.Constant:
        is_constant = isinstance(initializer.value, bool | int | float)
    dtype = variable._dtype
    return NewValue(
        path=variable.path,
        shape=tuple(variable._shape),
        value=lambda shape: initializer(tuple(shape), dtype=dtype),
        is_constant=is_constant,
        options={
            "dtype": dtype,
            "name": variable.name,
            "trainable": variable.trainable,
            "aggregation": variable._map_aggregation(variable.aggregation),
            "synchronization": variable._map_synchronization(variable.synchronization),
        },
    )


_is_creating = contextvars.ContextVar("tfdist_keras_creates_variable", default=False)


def keras_creates_variable() -> bool:
    """Whether the `tf.Variable` that is being created is the value of a Keras variable."""
    return _is_creating.get()


def patch_variable_creation() -> None:
    """Makes Keras variables mark the creation of their `tf.Variable`."""
    stock = Variable._initialize

    @functools.wraps(stock)
    def initialize(self: Any, value: Any) -> None:
        token = _is_creating.set(True)
        try:
            stock(self, value)
        finally:
            _is_creating.reset(token)

    Variable._initialize = initialize
