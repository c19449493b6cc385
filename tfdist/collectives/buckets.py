"""Buckets: gradients that are sent together, in the order in which backpropagation computes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

DEFAULT_BUCKET_BYTES = 4 * 2**20
_FIRST_BUCKET_BYTES = 2**20  # Small, so that the link is used early in backpropagation.


@dataclass(frozen=True)
class Bucket:
    """The positions, in the caller's list, of the tensors of one bucket, which have one dtype."""

    positions: tuple[int, ...]


def fill_buckets(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[Bucket]:
    """Distributes `tensors` over buckets in reverse order.

    Gradients are in the order of the variables, so the last layer's are at the end; backpropagation computes them
    first. Filled from the end, the first bucket is complete, and can be sent, while the gradients of the first layers
    are still computed (Li et al. 2020, "PyTorch Distributed", section 3.2). A tensor is never split: a bucket is
    closed as soon as it holds `bucket_bytes` or more, the first one at 1 MiB. Tensors of different dtypes
    fill separate buckets. A tensor whose shape is unknown when the function is traced has a separate bucket.

    Args:
        tensors: Dense tensors of any shape and dtype.
        bucket_bytes: Size from which a bucket is closed, in bytes; 0 puts all tensors of a dtype into one bucket.

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
        limit = bucket_bytes if closed[0] is not positions else min(bucket_bytes, _FIRST_BUCKET_BYTES)
        if bucket_bytes and filled_bytes >= limit:
            del open_buckets[tensor.dtype]
        else:
            open_buckets[tensor.dtype] = (positions, filled_bytes)
    return [Bucket(tuple(positions)) for positions in closed]
