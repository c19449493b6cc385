"""The losses of weight regularizers, computed where the weights are."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable


def regularization_losses(
    variables: Sequence[keras.Variable], scale: tf.Tensor | None
) -> Iterator[tuple[int, tf.Tensor, Any]]:
    """Yields for each regularized variable its index, the loss and, with a `scale`, the gradient of the scaled loss."""
    for index, variable in enumerate(variables):
        if getattr(variable, "regularizer", None) is None:
            continue
        held = held_variable(variable)
        with tf.device(held.device):
            value = held.read_value()
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(value)
                loss = tf.reduce_sum(variable.regularizer(value))  # Keras adds the elements of other shapes
            given = None if scale is None else tf.cast(scale, loss.dtype)
            gradient = None if scale is None else tape.gradient(loss, value, given)
            loss = tf.cast(loss, tf.float32)
        yield index, loss, gradient
