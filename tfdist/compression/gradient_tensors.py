"""Operations on gradients, dense or `tf.IndexedSlices`: packing, scaling, sums of rows, finite values."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates `tensors`, of one dtype and any shapes, to one vector."""
    vectors = [tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]) for tensor in tensors]
    return vectors[0] if len(vectors) == 1 else tf.concat(vectors, axis=0)


def unflatten(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits the result of `flatten` into tensors of the shapes of `like`."""
    if len(like) == 1:
        return [tf.reshape(vector, tf.shape(like[0]) if like[0].shape.num_elements() is None else like[0].shape)]
    parts = tf.split(vector, [tensor.shape.num_elements() for tensor in like])
    pairs = zip(parts, like, strict=True)
    return [part if tensor.shape.rank == 1 else tf.reshape(part, tensor.shape) for part, tensor in pairs]


def values_of(gradient: Any) -> tf.Tensor:
    """Returns the values of a gradient, for `tf.IndexedSlices` the values of the rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Any, values: tf.Tensor) -> Any:
    """Returns `gradient` with other values; `tf.IndexedSlices` keep their indices."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def divided(gradient: Any, divisor: Any) -> Any:
    """Returns a gradient divided by a scalar, in the dtype of the gradient.

    >>> import tensorflow as tf
    >>> divided(tf.constant([3.0]), 2).numpy()
    array([1.5], dtype=float32)
    """
    values = tf.convert_to_tensor(values_of(gradient))
    return with_values(gradient, tf.cast(values / tf.cast(divisor, values.dtype), values.dtype))


def multiplied(gradient: Any, factor: Any) -> Any:
    """Returns a gradient multiplied by a scalar, in the dtype of the gradient."""
    values = values_of(gradient)
    return with_values(gradient, values * tf.cast(factor, values.dtype))


def added(total: Any, gradient: Any) -> Any:
    """Returns the sum of two gradients, dense or `tf.IndexedSlices`; None counts as zero.

    An index may occur twice in the result: callers that square or clip add up its rows first.
    """
    if total is None or gradient is None:
        return gradient if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        values, indices = tf.concat([total.values, gradient.values], 0), [total.indices, gradient.indices]
        return tf.IndexedSlices(values, tf.concat(indices, 0), total.dense_shape)
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)


def zeros_unless(contributes: tf.Tensor | None, gradient: Any) -> Any:
    """Returns `gradient`, or zeros of its shape if the bool scalar `contributes` is false; `None` counts as true."""
    values = tf.convert_to_tensor(values_of(gradient))
    if contributes is not None:
        present = values
        values = tf.cond(contributes, lambda: tf.identity(present), lambda: tf.zeros_like(present))
    return with_values(gradient, values)


def sum_duplicate_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the rows of `slices` that have the same index, so that each index occurs once.

    Only then are norms and squares of a sparse gradient those of the dense one: if an id occurs twice, Keras computes
    `a² + b²` in place of `(a + b)²`.

    >>> import tensorflow as tf
    >>> slices = tf.IndexedSlices(tf.constant([[1.], [2.], [4.]]), tf.constant([7, 3, 7]), tf.constant([9, 1]))
    >>> summed = sum_duplicate_rows(slices)
    >>> summed.indices.numpy().tolist(), summed.values.numpy().tolist()
    ([7, 3], [[5.0], [2.0]])
    """
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns whether no value of `gradients` is NaN or Inf, a bool scalar.

    A finite sum proves that all its terms are finite, and costs one pass over the values without a temporary tensor.
    Only if a sum is not finite, which an overflow may cause, the values are checked one by one.

    >>> import tensorflow as tf
    >>> bool(all_finite([tf.constant([3e38, 3e38])])), bool(all_finite([tf.constant([1.0, float("nan")])]))
    (True, False)
    """
    tensors = [values_of(gradient) for gradient in gradients]
    if not tensors:
        return tf.constant(True)

    def each_value() -> tf.Tensor:
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors])

    sums_are_finite = tf.reduce_all([tf.math.is_finite(tf.reduce_sum(tensor)) for tensor in tensors])
    return tf.cond(sums_are_finite, lambda: tf.constant(True), each_value)


def with_shape(gradient: Any, shape: Sequence[int]) -> Any:
    """Returns a gradient of the variable's shape; the inferred one depends on the data for which a replica is traced.

    Functions that XLA compiles return rows of a table without the table's shape, which their compression needs.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        gradient.set_shape(shape)
        return gradient
    if gradient.dense_shape is not None and tf.get_static_value(gradient.dense_shape) is not None:
        return gradient
    return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(list(shape), gradient.indices.dtype))
