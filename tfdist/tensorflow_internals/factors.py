"""Factors of values: 1 changes nothing, also no dtype, and 0 gives 0, whatever the value is."""

from typing import Any

import tensorflow as tf


def is_scalar(value: Any) -> bool:
    """Whether a tensor or number has the rank 0, or a rank that is not known."""
    shape = getattr(value, "shape", ())
    return shape.rank in (0, None) if isinstance(shape, tf.TensorShape) else not len(shape)


def times(value: Any, fraction: Any) -> Any:
    """Returns `value * fraction`; 0 where `fraction` is 0, whatever `value` is.

    A replica without samples has the fraction 0; its loss, which may be NaN (a mean over nothing), counts as 0.
    """
    if is_one(fraction):
        return value
    value = tf.convert_to_tensor(value)
    return tf.math.multiply_no_nan(value, tf.cast(fraction, value.dtype))


def divided(value: Any, fraction: Any) -> Any:
    """Returns `value / fraction`; 0 where `fraction` is 0."""
    return value if is_one(fraction) else tf.math.divide_no_nan(value, tf.cast(fraction, value.dtype))


def is_one(fraction: Any) -> bool:
    """Whether a factor is the number 1, and no tensor."""
    return not tf.is_tensor(fraction) and fraction == 1
