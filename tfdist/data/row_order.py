"""The order of rows: which rows a batch consists of, as pure functions of the sizes of blocks, a seed and a step.

Rows are divided into as many *streams* as workers read: contiguous ranges of equal sizes (the first ones may have one
row more). A batch takes the next rows of every stream, row t of an epoch from stream t modulo the number of streams. So
batches do not depend on who reads, a worker whose streams are its own reads only their blocks, and all workers have
equally many batches, however unequal the blocks are.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Segment:
    """Rows `start` to `stop` of a block."""

    block: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Neighbouring rows of a stream that are in memory together, and are shuffled together."""

    segments: tuple[Segment, ...]  # where they are
    start: int  # their first position in the stream
    order: Any = None  # which row of the segments comes at each position, int64; None: as they are

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)


def rows_before(rows: int, stream: int, streams: int) -> int:
    """Returns how many of the first `rows` rows of an epoch a stream has.

    >>> [rows_before(7, stream, 3) for stream in range(3)]
    [3, 2, 2]
    """
    return (rows - stream + streams - 1) // streams


def segments_of_streams(rows_of_blocks: Sequence[int], streams: int) -> list[tuple[Segment, ...]]:
    """Divides blocks into streams.

    >>> for segments in segments_of_streams([3, 4], 2):
    ...     print([(segment.block, segment.start, segment.stop) for segment in segments])
    [(0, 0, 3), (1, 0, 1)]
    [(1, 1, 4)]
    """
    rows, ends = sum(rows_of_blocks), list(itertools.accumulate(rows_of_blocks))
    segments_by_stream, first = [], 0
    for stream in range(streams):
        last, segments = first + rows_before(rows, stream, streams), []
        while first < last:
            block = bisect.bisect_right(ends, first)
            begin = ends[block] - rows_of_blocks[block]
            stop = min(ends[block], last)
            segments.append(Segment(block, first - begin, stop - begin))
            first = stop
        segments_by_stream.append(tuple(segments))
    return segments_by_stream


def windows_of_epoch(segments: Sequence[Segment], stream: int, shuffled_rows: int, seed: int) -> list[Window]:
    """Returns the windows of a stream, which has these segments, in the epoch of a seed of at least 0.

    If `shuffled_rows` is 0, rows come as they are, and each segment is a window. Else segments come in a random order,
    and so many rows at least (fewer at the end) are a window whose rows come in a random order.

    >>> windows = windows_of_epoch([Segment(0, 0, 2), Segment(1, 0, 3)], 0, shuffled_rows=9, seed=5)
    >>> [(window.start, window.rows, sorted(window.order.tolist())) for window in windows]
    [(0, 5, [0, 1, 2, 3, 4])]
    """
    if not shuffled_rows:
        starts = itertools.accumulate((segment.rows for segment in segments), initial=0)
        return [Window((segment,), start) for segment, start in zip(segments, starts, strict=False)]
    generator = np.random.default_rng([seed, stream])
    windows, together, start = [], [], 0
    for number, chosen in enumerate(generator.permutation(len(segments)).tolist()):
        together.append(segments[chosen])
        rows = sum(segment.rows for segment in together)
        if rows >= shuffled_rows or number == len(segments) - 1:
            windows.append(Window(tuple(together), start, generator.permutation(rows)))
            together, start = [], start + rows
    return windows


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of a stream, by their positions in an epoch."""

    stream: int
    start: int
    stop: int


@dataclass(frozen=True)
class BatchRows:
    """Which rows the batches of an epoch consist of.

    >>> batches = BatchRows(rows=7, batch_size=4, streams=2, replicas_of_workers=(1, 1), rank=1)
    >>> batches.number, batches.ranges(0), batches.ranges(1)
    (2, [RowRange(stream=1, start=0, stop=2)], [RowRange(stream=1, start=2, stop=3)])
    """

    rows: int
    batch_size: int  # the number of rows of a batch; the last one may have fewer
    streams: int
    drop_remainder: bool = False  # whether a last batch with fewer rows is left out
    replicas_of_workers: tuple[int, ...] = (1,)  # the number of replicas of each worker that shares the batches
    rank: int = 0  # the rank of the worker that reads

    @property
    def number(self) -> int:
        """The number of batches of an epoch."""
        return self.complete if self.drop_remainder else -(-self.rows // self.batch_size)

    @property
    def complete(self) -> int:
        """The number of batches of an epoch that have `batch_size` rows."""
        return self.rows // self.batch_size

    def sizes(self, first: int) -> list[int]:
        """Returns the numbers of rows of this worker in complete batches from batch `first` on; they repeat.

        >>> BatchRows(rows=99, batch_size=5, streams=2, replicas_of_workers=(1, 1), rank=0).sizes(0)
        [3, 2]
        """
        period = self.streams // math.gcd(self.batch_size, self.streams)
        ends = [(step * self.batch_size, (step + 1) * self.batch_size) for step in range(first, first + period)]
        sizes = [sum(rows.stop - rows.start for rows in self._ranges(*rows_of_epoch)) for rows_of_epoch in ends]
        return sizes[:1] if len(set(sizes)) == 1 else sizes

    @property
    def constant_rows(self) -> int | None:
        """The number of rows of this worker in every batch, None if it varies."""
        replicas = sum(self.replicas_of_workers)
        if not self.drop_remainder or self.batch_size % replicas or self.batch_size % self.streams:
            return None
        return self.batch_size // replicas * self.replicas_of_workers[self.rank]

    def ranges(self, step: int) -> list[RowRange]:
        """Returns this worker's rows of a batch, in the order of the batch."""
        first = step * self.batch_size
        return self._ranges(first, min(first + self.batch_size, self.rows))

    def _ranges(self, first: int, last: int) -> list[RowRange]:
        stream_ranges = [
            RowRange(stream, rows_before(first, stream, self.streams), rows_before(last, stream, self.streams))
            for stream in range(self.streams)
        ]
        begin, end = self._bounds(last - first, [rows.stop - rows.start for rows in stream_ranges])
        ranges, position = [], 0
        for rows in stream_ranges:
            start = rows.start + max(0, begin - position)
            position += rows.stop - rows.start
            stop = rows.stop - max(0, position - end)
            if start < stop:
                ranges.append(RowRange(rows.stream, start, stop))
        return ranges

    def _bounds(self, rows: int, rows_of_streams: list[int]) -> tuple[int, int]:
        """Returns the first and the last position of this worker in a batch of `rows` rows."""
        before, replicas = self._replicas_before, self._replicas_before[-1]
        if all(number * self.streams % replicas == 0 for number in before):  # no two workers share a stream
            starts = [0, *itertools.accumulate(rows_of_streams)]
            bounds = [starts[number * self.streams // replicas] for number in before]
        else:
            bounds = [number * rows // replicas for number in before]
        return bounds[self.rank], bounds[self.rank + 1]

    @cached_property
    def _replicas_before(self) -> list[int]:
        return list(itertools.accumulate(self.replicas_of_workers, initial=0))
