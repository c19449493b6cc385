"""Reads and assigns a replica's own copies of variables."""

from typing import Any

import tensorflow as tf


def read(variable: Any) -> tf.Tensor:
    """Returns this replica's value of a `keras.Variable` or `tf.Variable`."""
    return tf.convert_to_tensor(getattr(variable, "value", variable) if _is_keras(variable) else variable)


def assign(strategy: Any, variable: Any, value: Any) -> None:
    """Assigns `value` to this replica's copy of a variable, cast to its dtype."""
    held = variable.value if _is_keras(variable) else variable
    strategy.extended.update(held, _assign, args=(value,), group=False)


def _assign(variable: tf.Variable, value: Any) -> None:
    variable.assign(tf.cast(value, variable.dtype))


def _is_keras(variable: Any) -> bool:
    return not isinstance(variable, tf.Variable | tf.distribute.DistributedValues)
