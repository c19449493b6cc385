"""Gradients as Keras hands them over: dense tensors, or rows (`tf.IndexedSlices`)."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def values_of(gradient: Any) -> tf.Tensor:
    """The values of a gradient, of its rows alone where it has rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Any, values: tf.Tensor) -> Any:
    """A gradient of the same rows, if it has rows, with other values."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def divided(gradient: Any, divisor: Any) -> Any:
    """A gradient divided by a scalar, in its dtype.

    >>> import tensorflow as tf
    >>> divided(tf.constant([3.0]), 2).numpy()
    array([1.5], dtype=float32)
    """
    values = tf.convert_to_tensor(values_of(gradient))
    return with_values(gradient, tf.cast(values / tf.cast(divisor, values.dtype), values.dtype))


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Whether no value of the gradients is NaN or Inf, a bool scalar."""
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(values_of(gradient))) for gradient in gradients])
