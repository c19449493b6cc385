"""Batches, shared out by rows."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.models import first_input


def split(batch: Any, parts: int) -> list[Any]:
    """The rows of a batch in at most `parts` pieces of one row or more, as even as possible, in order.

    >>> import tensorflow as tf
    >>> [part[0].shape[0] for part in split((tf.zeros([7, 2]),), 3)]
    [3, 2, 2]
    """
    rows = count(batch)
    parts = max(1, min(parts, rows))
    sizes = [rows // parts + (number < rows % parts) for number in range(parts)]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tf.nest.map_structure(lambda leaf, at=start, n=size: _rows(leaf, at, n), batch))
        start += size
    return pieces


def split_all(batches: Sequence[Any], parts: int) -> list[list[Any]]:
    """The rows of each of some batches in at most `parts` pieces: by part, its pieces of the batches that have one.

    >>> import tensorflow as tf
    >>> split = split_all([(tf.zeros([5, 2]),), (tf.zeros([1, 2]),)], 2)
    >>> [[piece[0].shape[0] for piece in part] for part in split]
    [[3, 1], [2]]
    """
    by_batch = [split(batch, parts) for batch in batches]
    return [[pieces[part] for pieces in by_batch if part < len(pieces)] for part in range(max(map(len, by_batch)))]


def count(batch: Any) -> int:
    """How many rows a batch has.

    >>> import tensorflow as tf
    >>> count((tf.zeros([7, 2]), tf.zeros([7])))
    7
    """
    first = first_input(batch)
    rows = first.shape[0]
    return int(tf.shape(first)[0]) if rows is None else int(rows)


def _rows(leaf: Any, start: int, size: int) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.SparseTensor):
        rank = int(leaf.dense_shape.shape[0])
        return tf.sparse.slice(leaf, [start] + [0] * (rank - 1), [size, *leaf.dense_shape.numpy().tolist()[1:]])
    return leaf[start : start + size]
