"""Clips gradients of which each holder has parts, by the norms of the whole ones, with Keras' formulas."""

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.compression.gradient_tensors import multiplied, values_of, with_values
from tfdist.keras_internals.keras_updates import clip_by_norm
from tfdist.updates.update_engine import HeldUpdate


class HeldParts(HeldUpdate, Protocol):
    """Who holds which parts or copies of gradients."""

    #: The number of the variable of each gradient that is held here.
    numbers: Sequence[int]

    def squares(self, gradients: Sequence[Any], *, of_parts: bool) -> Sequence[tf.Tensor | None]:
        """Returns for each variable the sum of the squares of its whole gradient, a scalar.

        With `of_parts` the result is `None` for gradients that are held whole.
        """


def clip(held: HeldParts, gradients: Sequence[Any]) -> list[Any]:
    """Clips by the optimizer's `clipnorm`, `global_clipnorm` or `clipvalue`."""
    optimizer = held.update.optimizer
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        squares, limit, clip_whole = held.squares(gradients, of_parts=True), optimizer.clipnorm, clip_by_norm(optimizer)

        def by_norm(gradient: Any, number: int) -> Any:
            square = squares[number]
            return clip_whole(gradient) if square is None else _clipped_by_norm(gradient, square, limit)

        return held.each(by_norm, gradients, held.numbers)
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        limit = optimizer.global_clipnorm
        norm = tf.sqrt(tf.reduce_sum(tf.stack(held.squares(gradients, of_parts=False))))
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)  # NaN if the norm is not finite
        return held.each(lambda gradient: multiplied(gradient, scale), gradients)
    if optimizer.clipvalue and optimizer.clipvalue > 0:
        limit = optimizer.clipvalue
        return held.each(lambda gradient: tf.clip_by_value(tf.convert_to_tensor(gradient), -limit, limit), gradients)
    return list(gradients)


def squares_dtype(gradients: Sequence[Any]) -> tf.DType:
    """The dtype in which the squares of gradients are added up."""
    return tf.float64 if any(values_of(gradient).dtype == tf.float64 for gradient in gradients) else tf.float32


def sum_of_squares(gradient: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns the sum of the squares of a gradient; rows of the same index are added first."""
    return tf.cast(tf.reduce_sum(tf.square(tf.convert_to_tensor(gradient))), dtype)


def _clipped_by_norm(gradient: Any, square: tf.Tensor, limit: float) -> Any:
    values = values_of(gradient)
    square = tf.cast(square, values.dtype)
    norm = tf.where(square > 0, tf.sqrt(tf.where(square > 0, square, tf.ones_like(square))), square)
    return with_values(gradient, values * limit / tf.maximum(norm, limit))
