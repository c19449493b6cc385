"""The `tf.Variable`s behind Keras' variables: created in another way, and replaced by others on other devices."""

import contextvars
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import Variable
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import hooks_of
from tfdist.utils.temporary_values import setting

_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
_numbers = itertools.count()
_is_creating = contextvars.ContextVar("tfdist_keras_creates_variable", default=False)


def held_variable(variable: keras.Variable) -> tf.Variable:
    """Returns the `tf.Variable` that holds the value of a variable, regardless of the active scope."""
    return variable._value


def identity_of(held: tf.Variable) -> str:
    """Returns the id by which optimizers and functions know a `tf.Variable`. Its copies and parts have the same."""
    return str(held._unique_id)


def hold(variable: keras.Variable, held: tf.Variable) -> None:
    """Makes `held`, which must have the `_unique_id` of the present one, hold the value of `variable` from now on."""
    variable._value = held


@contextmanager
def holding(values: Mapping[int, tuple[keras.Variable, tf.Variable]]) -> Iterator[None]:
    """In the body, each variable of `values`, a mapping from variables' ids, is held by the given `tf.Variable`."""
    before = [(variable, variable._value) for variable, _ in values.values()]
    try:
        for variable, held in values.values():
            variable._value = held
        yield
    finally:
        for variable, held in before:
            variable._value = held


def optimizer_and_loss_scale(optimizer: Any) -> tuple[Any, Any]:
    """Returns the optimizer that updates the weights, and the `LossScaleOptimizer` around it or None."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return (optimizer.inner_optimizer, optimizer) if scaled else (optimizer, None)


def shared_optimizer_variables(optimizer: Any) -> list[keras.Variable]:
    """Returns the scalars that all devices read: the iterations, the learning rate, the loss scale."""
    inner, outer = optimizer_and_loss_scale(optimizer)
    rate = getattr(inner, "_learning_rate", None)
    shared = [inner._iterations, *([rate] if isinstance(rate, keras.Variable) else [])]
    return shared if outer is None else [*shared, *outer._variables]


class NewValue:
    """A variable that is being created, with the attributes of a `tf.Variable`. Its value is computed once.

    Attributes:
        variable: The Keras variable.
        path: Its path.
        shape: Its shape.
        is_constant: Whether all elements of the value are equal.
        device: Where the complete value is computed; set by whoever creates what holds it.
    """

    device = ""

    def __init__(self, variable: Any, initializer: Any) -> None:
        """Describes the `tf.Variable` that Keras would create."""
        self.variable, self.path, self.shape = variable, variable.path, tf.TensorShape(variable._shape)
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
