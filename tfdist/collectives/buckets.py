"""Buckets: gradients that travel together, in the order in which backpropagation makes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

DEFAULT_BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Bucket:
    """The positions, in the caller's list, of the tensors of one bucket; all have one dtype."""

    positions: tuple[int, ...]


def fill_buckets(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[Bucket]:
    """Distributes `tensors` over buckets in reverse order.

    Gradients come in the order of the variables, so the last layer's come last; backpropagation makes them first.
    Filled from the end, the first bucket is complete while the gradients of the first layers are still computed, and
    can be sent meanwhile (Li et al. 2020, "PyTorch Distributed", section 3.2). A tensor is never split: a bucket is
    closed as soon as it holds `bucket_bytes` or more. Tensors of several dtypes fill separate buckets. A tensor
    whose shape is not known when the function is traced has a bucket to itself.

    Args:
      tensors: dense tensors of any shape and dtype.
      bucket_bytes: size from which a bucket is closed, in bytes; 0 puts all tensors of a dtype into one bucket.

    Returns:
      The buckets in the order in which they should be sent.

    >>> import tensorflow as tf
    >>> gradients = [tf.zeros([4]), tf.zeros([2]), tf.zeros([1], tf.float16), tf.zeros([2])]
    >>> [bucket.positions for bucket in fill_buckets(gradients, bucket_bytes=16)]
    [(3, 1), (2,), (0,)]
    """
    closed: list[list[int]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for position in reversed(range(len(tensors))):
        tensor = tensors[position]
        elements = tensor.shape.num_elements()
        if elements is None:
            closed.append([position])
            continue
        if tensor.dtype not in open_buckets:
            positions: list[int] = []
            closed.append(positions)
            open_buckets[tensor.dtype] = (positions, 0)
        positions, filled_bytes = open_buckets[tensor.dtype]
        positions.append(position)
        filled_bytes += elements * tensor.dtype.size
        if bucket_bytes and filled_bytes >= bucket_bytes:
            del open_buckets[tensor.dtype]
        else:
            open_buckets[tensor.dtype] = (positions, filled_bytes)
    return [Bucket(tuple(positions)) for positions in closed]


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates `tensors`, of one dtype and any shapes, to one vector."""
    if len(tensors) == 1:
        return tf.reshape(tensors[0], [-1])
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def unflatten(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits what `flatten` made of tensors shaped as `like`."""
    if len(like) == 1:
        return [tf.reshape(vector, tf.shape(like[0]) if like[0].shape.num_elements() is None else like[0].shape)]
    parts = tf.split(vector, [tensor.shape.num_elements() for tensor in like])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, like, strict=True)]
