"""The `tf.Variable`s behind Keras' variables: replaced by others on other devices."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf


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


def compiled_optimizer(model: Any) -> Any:
    """Returns the optimizer of a model; None if it was not compiled, or without one."""
    return getattr(model, "optimizer", None)


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
