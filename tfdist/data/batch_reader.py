"""Reads batches: keeps the rows that the next batches need in memory, and loads what follows in the background."""

import bisect
import collections
import concurrent.futures
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfdist.data.block_source import BlockSource, checked_rows
from tfdist.data.row_order import BatchRows, RowRange, Segment, Window, segments_of_streams, windows_of_epoch
from tfdist.data.tensor_layout import TensorFormat

_LOADING_THREADS = 2


class BatchReader:
    """Reads any batch of any epoch; cheap if the batches of an epoch come in order.

    Of each stream that a worker reads, two windows are in memory, and each of the loading threads holds one block.

    Attributes:
        source: Where the rows are.
        tensors: What a batch consists of.
        shuffled_rows: 0, or how many rows of a stream are shuffled together.
        owner: The object whose end releases the rows, None if there is none.
    """

    def __init__(
        self, source: BlockSource, tensors: Sequence[TensorFormat], shuffled_rows: int, owner: object = None
    ) -> None:
        self._owner = owner  # what releases the rows when it is collected: not while they are read
        self.source, self.tensors, self.shuffled_rows = source, tuple(tensors), shuffled_rows
        self._columns = list(dict.fromkeys(column.column for tensor in tensors for column in tensor.columns))
        self._segments: dict[int, list[tuple[Segment, ...]]] = {}
        self._windows: dict[tuple[int, int], tuple[int, list[Window], list[int]]] = {}
        self._loaded: dict[tuple[int, int], collections.OrderedDict[tuple[int, int], Any]] = {}
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def read(self, batches: BatchRows, seed: int, first: int, last: int) -> list[np.ndarray]:
        """Returns the tensors of successive batches, those rows that `batches` gives to this worker.

        Args:
            batches: The rows of the batches.
            seed: Of the epoch, at least 0; ignored without a shuffle.
            first: The number of the first batch in the epoch, from 0.
            last: The number after that of the last batch.

        Returns:
            The rows of all batches, for each tensor.
        """
        seed = seed if self.shuffled_rows else 0
        pieces: list[tuple[list[np.ndarray], int, int]] = []
        for step in range(first, last):
            for rows in batches.ranges(step):
                for arrays, start, stop in self._pieces(batches.streams, rows, seed):
                    if pieces and pieces[-1][0] is arrays and pieces[-1][2] == start:
                        start = pieces.pop()[1]
                    pieces.append((arrays, start, stop))
        if not pieces:
            return [np.empty([0, *tensor.shape], tensor.dtype) for tensor in self.tensors]
        cut = [[array[start:stop] for array in arrays] for arrays, start, stop in pieces]
        # Also copied where there is one piece: TensorFlow takes an array's memory, and writes results of `map` into it.
        return [np.concatenate(parts) for parts in zip(*cut, strict=True)]

    def _pieces(self, streams: int, rows: RowRange, seed: int) -> Iterator[tuple[list[np.ndarray], int, int]]:
        """Yields where rows of a stream are: the arrays of a window, and the first and last position in them."""
        windows, starts = self._windows_of(streams, rows.stream, seed)
        first = rows.start
        while first < rows.stop:
            number = bisect.bisect_right(starts, first) - 1
            window = windows[number]
            arrays = self._arrays((streams, rows.stream), seed, windows, number)
            last = min(rows.stop, window.start + window.rows)
            yield arrays, first - window.start, last - window.start
            first = last

    def _windows_of(self, streams: int, stream: int, seed: int) -> tuple[list[Window], list[int]]:
        with self._lock:
            if streams not in self._segments:
                self._segments[streams] = segments_of_streams(self.source.rows_of_blocks, streams)
            known = self._windows.get((streams, stream))
            if known is None or known[0] != seed:
                windows = windows_of_epoch(self._segments[streams][stream], stream, self.shuffled_rows, seed)
                known = (seed, windows, [window.start for window in windows])
                self._windows[streams, stream] = known
            return known[1:]

    def _arrays(self, stream: tuple[int, int], seed: int, windows: list[Window], number: int) -> list[np.ndarray]:
        """Returns the tensors of a window, and begins to load the next one."""
        with self._lock:
            loaded = self._loaded.setdefault(stream, collections.OrderedDict())
            for wanted in (number, number + 1):
                if (seed, wanted) not in loaded and wanted < len(windows):
                    loaded[seed, wanted] = self._submit(windows[wanted])
            present = loaded[seed, number]
            for known in [known for known in loaded if known not in ((seed, number), (seed, number + 1))]:
                del loaded[known]  # not cancelled: another iterator may wait for it
        return present.result()

    def _submit(self, window: Window) -> "concurrent.futures.Future[list[np.ndarray]]":
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(_LOADING_THREADS, "tfdist-data")
        return self._threads.submit(self._load, window)

    def _load(self, window: Window) -> list[np.ndarray]:
        parts = []
        for segment in window.segments:
            table = checked_rows(self.source, segment.block, self.source.read(segment.block, self._columns))
            table = table.slice(segment.start, segment.rows)
            place = self.source.name_of(segment.block)
            parts.append([tensor.array(table, place, segment.start) for tensor in self.tensors])
        arrays = [values[0] if len(values) == 1 else np.concatenate(values) for values in zip(*parts, strict=True)]
        return arrays if window.order is None else [array[window.order] for array in arrays]
