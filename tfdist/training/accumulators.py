"""The accumulators of a replica: sums of the gradients of several micro-steps."""

from typing import Any

import tensorflow as tf


def add(accumulator: tf.Variable, gradient: Any) -> None:
    """Adds a gradient, dense or `tf.IndexedSlices`, to an accumulator."""
    if isinstance(gradient, tf.IndexedSlices):
        accumulator.scatter_add(gradient)
    else:
        accumulator.assign_add(tf.cast(gradient, accumulator.dtype))


def added(accumulator: tf.Variable, gradient: Any) -> tf.Tensor:
    """Returns the sum of an accumulator and a gradient, and leaves the accumulator unchanged."""
    total = tf.convert_to_tensor(accumulator)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], gradient.values)
    return total + tf.cast(gradient, total.dtype)
