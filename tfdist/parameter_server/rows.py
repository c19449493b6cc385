"""Batches, shared out by rows."""

from typing import Any

import tensorflow as tf

from tfdist.keras_internals.models import first_input


def split(batch: Any, parts: int) -> list[Any]:
    """The rows of a batch in at most `parts` pieces of one row or more, as even as possible, in order.

    >>> import tensorflow as tf
    >>> [part[0].shape[0] for part in split((tf.zeros([7, 2]),), 3)]
    [3, 2, 2]
    """
    first = first_input(batch)
    rows = int(tf.shape(first)[0]) if not isinstance(first, tf.SparseTensor) else int(first.dense_shape[0])
    parts = max(1, min(parts, rows))
    sizes = [rows // parts + (number < rows % parts) for number in range(parts)]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tf.nest.map_structure(lambda leaf, at=start, n=size: _rows(leaf, at, n), batch))
        start += size
    return pieces


def _rows(leaf: Any, start: int, size: int) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.SparseTensor):
        rank = int(leaf.dense_shape.shape[0])
        return tf.sparse.slice(leaf, [start] + [0] * (rank - 1), [size, *leaf.dense_shape.numpy().tolist()[1:]])
    return leaf[start : start + size]
