"""Creates the `tf.Variable` behind a Keras variable in another way, from the initializer of the variable."""

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import Variable
from tfdist.keras_internals.placed_variables import hold
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import hooks_of
from tfdist.utils.temporary_values import setting

_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
_is_creating = contextvars.ContextVar("tfdist_keras_creates_variable", default=False)


@dataclass(frozen=True)
class NewValue:
    """A variable that is being created.

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


@patch
def patch_variable_creation() -> None:
    """Lets strategies return what holds the value of a new Keras variable, and marks the creation of its value."""
    stock, stock_value = Variable._initialize_with_initializer, Variable._initialize

    @replace(Variable, "_initialize_with_initializer")
    def initialize(self: Any, initializer: Any) -> None:
        strategy = tf.distribute.get_strategy()
        create = hooks_of(strategy).create
        held = None if create is None else create(strategy, _described(self, initializer))
        if held is None:
            stock(self, initializer)
        else:
            hold(self, held)

    @replace(Variable, "_initialize")
    def initialize_value(self: Any, value: Any) -> None:
        with setting(_is_creating, True):
            stock_value(self, value)


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


def keras_creates_variable() -> bool:
    """Whether the `tf.Variable` that is being created is the value of a Keras variable."""
    return _is_creating.get()
