"""Buckets: gradients that are sent together, in the order in which backpropagation computes them."""

from collections.abc import Sequence

import tensorflow as tf

DEFAULT_BUCKET_BYTES = 4 * 2**20
# The size of the first bucket, so that the link is used early in backpropagation. A tensor of this size is sent alone:
# packing and unpacking it are two passes over its values, which take longer than one more exchange.
_SMALL_BUCKET_BYTES = 2**20


def fill_buckets(
    tensors: Sequence[tf.Tensor], bucket_bytes: int, *, packs_large: bool = False
) -> list[tuple[int, ...]]:
    """Distributes `tensors` over buckets in reverse order; returns the positions of the tensors of each bucket.

    Gradients are in the order of the variables, so the last layer's are at the end; backpropagation computes them
    first. Filled from the end, the first bucket is complete, and can be sent, while the gradients of the first layers
    are still computed (Li et al. 2020, "PyTorch Distributed", section 3.2). A tensor is never split: a bucket is
    closed as soon as it holds `bucket_bytes` or more, the first one at 1 MiB. A tensor of 1 MiB, or of `bucket_bytes`
    if that is less, has a separate bucket, and so has one whose shape is unknown when the function is traced. Tensors
    of different dtypes fill separate buckets.

    `bucket_bytes` of 0 put all tensors of a dtype into one bucket. With `packs_large`, tensors of 1 MiB, too, share
    buckets with their neighbours. The result has the order in which the buckets' last gradients are computed.

    >>> import tensorflow as tf
    >>> gradients = [tf.zeros([2]), tf.zeros([4]), tf.zeros([1]), tf.zeros([1], tf.float16), tf.zeros([1])]
    >>> fill_buckets(gradients, bucket_bytes=16)
    [(3,), (1,), (4, 2, 0)]
    """
    small_bytes = min(bucket_bytes, _SMALL_BUCKET_BYTES)
    closed: list[tuple[int, ...]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for position in reversed(range(len(tensors))):
        tensor = tensors[position]
        elements = tensor.shape.num_elements()
        nbytes = None if elements is None else elements * tensor.dtype.size
        if nbytes is None or (bucket_bytes and nbytes >= small_bytes and not packs_large):
            closed.append((position,))
            continue
        positions, filled_bytes = open_buckets.pop(tensor.dtype, ([], 0))
        positions.append(position)
        filled_bytes += nbytes
        if bucket_bytes and filled_bytes >= (bucket_bytes if closed else small_bytes):
            closed.append(tuple(positions))
        else:
            open_buckets[tensor.dtype] = (positions, filled_bytes)
    closed += [tuple(positions) for positions, _ in open_buckets.values()]
    return sorted(closed, key=min, reverse=True)
