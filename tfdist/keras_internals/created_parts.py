"""Creates the `tf.Variable` behind a Keras variable in another way, from the initializer of the variable."""

import contextvars
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import Variable
from tfdist.keras_internals.placed_variables import hold
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import hooks_of
from tfdist.utils.temporary_values import setting

_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
_numbers = itertools.count()
_is_creating = contextvars.ContextVar("tfdist_keras_creates_variable", default=False)


class NewValue:
    """A variable that is being created, with the attributes of a `tf.Variable`. Its value is computed once.

    Attributes:
        path: The path of the Keras variable.
        shape: Its shape.
        is_constant: Whether all elements of the value are equal.
        device: Where the complete value is computed; set by whoever creates what holds it.
    """

    device = ""

    def __init__(self, variable: Any, initializer: Any) -> None:
        """Describes the `tf.Variable` that Keras would create."""
        self.path, self.shape = variable.path, tf.TensorShape(variable._shape)
        self.dtype, self.name, self.trainable = tf.as_dtype(variable._dtype), f"{variable.name}:0", variable.trainable
        self.aggregation = variable._map_aggregation(variable.aggregation)
        self.synchronization = variable._map_synchronization(variable.synchronization)
        self.is_constant = type(initializer) in _CONSTANTS
        if type(initializer) is keras.initializers.Constant:
            self.is_constant = isinstance(initializer.value, bool | int | float)
        self._initializer = initializer

    @functools.cached_property
    def _unique_id(self) -> str:
        return f"split_{self.name.removesuffix(':0')}_{next(_numbers)}"

    @property
    def _shared_name(self) -> str:
        return self._unique_id

    def read_value(self) -> tf.Tensor:
        """Returns the complete value."""
        if not hasattr(self, "_whole"):
            self._whole = self.constant(self.shape)
        return self._whole

    def constant(self, shape: Sequence[int]) -> tf.Tensor:
        """Returns a value of this shape, such as that of a part if all elements are equal."""
        return tf.cast(self._initializer(tuple(shape), dtype=self.dtype.name), self.dtype)


@patch
def patch_variable_creation() -> None:
    """Lets strategies return what holds the value of a new Keras variable, and marks the creation of its value."""
    stock, stock_value = Variable._initialize_with_initializer, Variable._initialize

    @replace(Variable, "_initialize_with_initializer")
    def initialize(self: Any, initializer: Any) -> None:
        strategy = tf.distribute.get_strategy()
        create = hooks_of(strategy).create
        held = None if create is None else create(strategy, NewValue(self, initializer))
        if held is None:
            stock(self, initializer)
        else:
            hold(self, held)

    @replace(Variable, "_initialize")
    def initialize_value(self: Any, value: Any) -> None:
        with setting(_is_creating, True):
            stock_value(self, value)


def keras_creates_variable() -> bool:
    """Whether the `tf.Variable` that is being created is the value of a Keras variable."""
    return _is_creating.get()
