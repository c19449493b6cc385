"""Adds up replicas' values in the order of TensorFlow's all-reduce, so that the sums have the same bits."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.collectives.all_reduce_algorithms import piece_lengths

_ALIGNMENT_BYTES = 64  # of the chunks of TensorFlow's ring (`CollectiveAdapter::AlignedChunkElts`)


@dataclass(frozen=True)
class Segment:
    """Values that are added up in the same order.

    Attributes:
        start: The first of them.
        stop: One more than the last.
        first: The position of the replica whose value is first; the others follow in the order of their positions.
    """

    start: int
    stop: int
    first: int


def ring_segments(length: int, value_bytes: int, replicas: int) -> list[Segment]:
    """Returns in which order an all-reduce of a vector adds up its values.

    A ring reduces a tensor in one chunk for each replica: chunk `i` starts at replica `i` and passes all others.

    Args:
        length: The number of values that `Group.sum` takes, which may send them in several tensors.
        value_bytes: The size of a value.
        replicas: The number of replicas.

    >>> [(segment.start, segment.stop, segment.first) for segment in ring_segments(50, 4, 3)]
    [(0, 32, 0), (32, 50, 1)]
    """
    found, begin = [], 0
    for piece in piece_lengths(length, length * value_bytes):
        chunk = -(-piece // replicas)
        chunk += (_ALIGNMENT_BYTES - chunk * value_bytes % _ALIGNMENT_BYTES) // value_bytes
        for first in range(replicas):
            start, stop = min(first * chunk, piece), min((first + 1) * chunk, piece)
            if stop > start:
                found.append(Segment(begin + start, begin + stop, first))
        begin += piece
    return found


def sum_in_ring_order(rows: tf.Tensor, spans: Sequence[tuple[int, int]], length: int) -> tf.Tensor:
    """Adds up parts of a vector, as an all-reduce of the vector would.

    Args:
        rows: The values of each replica, by position, `[replicas, part length]`: those of the spans, one after another,
            and any others.
        spans: Begin and end of parts of the vector.
        length: The length of the vector.

    Returns:
        The sums, `[part length]`; those of others are not computed, but zeros.
    """
    replicas, part = rows.shape
    if replicas == 2:
        return tf.reduce_sum(rows, axis=0)
    sums, column = [], 0
    segments = ring_segments(length, rows.dtype.size, replicas)
    for start, stop in spans:
        for segment in segments:
            begin, end = max(segment.start, start), min(segment.stop, stop)
            if begin < end:
                columns = slice(column + begin - start, column + end - start)
                values = [rows[(segment.first + step) % replicas, columns] for step in range(replicas)]
                sums.append(functools.reduce(_added, values))
        column += stop - start
    if column < part:
        sums.append(tf.zeros([part - column], rows.dtype))
    return tf.concat(sums, axis=0) if len(sums) > 1 else sums[0]


def _added(total: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    # TensorFlow would make one `AddN` of additions that follow directly on each other, in the order of their names.
    return tf.raw_ops.PreventGradient(input=total + value, message="sums of gradients are not differentiated")
