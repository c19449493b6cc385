"""Reads batches in the background, and makes a `tf.data` pipeline of them: epochs, steps, batches."""

import bisect
import collections
import concurrent.futures
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.data.block_source import BlockSource, checked_rows
from tfdist.data.row_order import BatchRows, RowRange, Segment, Window, segments_of_streams, windows_of_epoch
from tfdist.data.tensor_layout import BatchLayout, TensorFormat
from tfdist.tensorflow_internals.batch_selection import SelectableDataset, Selection
from tfdist.tensorflow_internals.input_pipeline import has_unseeded, random_seeds

_LOADING_THREADS = 2


class BatchReader:
    """Reads any batch of any epoch; cheap if the batches of an epoch come in order.

    Two windows of each stream that a worker reads are in memory, and each of the loading threads holds one block.
    """

    def __init__(
        self, source: BlockSource, tensors: Sequence[TensorFormat], shuffled_rows: int, owner: object = None
    ) -> None:
        self._owner = owner  # what releases the rows when it is collected: not while they are read
        self.source, self.tensors = source, tuple(tensors)
        self.shuffled_rows = shuffled_rows  # 0, or how many rows of a stream are shuffled together
        self._columns = list(dict.fromkeys(column.column for tensor in tensors for column in tensor.columns))
        self._segments: dict[int, list[tuple[Segment, ...]]] = {}
        self._windows: dict[tuple[int, int], tuple[int, list[Window], list[int]]] = {}
        self._loaded: dict[tuple[int, int], collections.OrderedDict[tuple[int, int], Any]] = {}
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def read(self, batches: BatchRows, seed: int, first: int, last: int) -> list[np.ndarray]:
        """Returns, for each tensor, the rows of batches `first` to `last` - 1 that `batches` gives to this worker.

        `seed` is that of the epoch, at least 0; ignored without a shuffle.
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


_READ_AHEAD_BATCHES = 4
_MOST_BATCHES_OF_CALL = 64
_BYTES_OF_CALL = 2 << 20


def batch_pipeline(
    reader: BatchReader, layout: BatchLayout, batch_size: int, *, seed: int | None, drop_remainder: bool, streams: int
) -> tf.data.Dataset:
    """Returns the dataset of batches.

    Each element of its source is the number of a batch, with a number for the epoch, so a batch depends on nothing that
    was read before it.
    """
    rows = sum(reader.source.rows_of_blocks)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    # An iterator draws one number, which is another one in each epoch; datasets of all selections share the generator.
    epochs = tf.data.Dataset.from_tensors(tf.zeros([], tf.int64))
    if reader.shuffled_rows:
        epochs = tf.data.Dataset.random(seed, rerandomize_each_iteration=True).take(1)

    def build(part: Selection) -> tf.data.Dataset:
        batches = BatchRows(rows, batch_size, part.streams, drop_remainder, part.replicas_of_workers, part.rank)
        first = min(part.first_batch, batches.number)
        sizes = batches.sizes(first)
        together = 1 if 0 in sizes else _batches_of_call(layout, max(sizes))

        dtypes = [tf.string if tensor.dtype == object else tf.as_dtype(tensor.dtype) for tensor in layout.tensors]

        def read(number: np.int64, step: np.int64, last: np.int64) -> Sequence[np.ndarray]:
            return reader.read(batches, int(number), int(step), int(last))

        def load(number: tf.Tensor, step: tf.Tensor, last: tf.Tensor) -> Any:
            tensors = tf.numpy_function(read, [number, step, last], dtypes)
            for tensor, expected in zip(tensors, layout.tensors, strict=True):
                tensor.set_shape([batches.constant_rows if together == 1 else None, *expected.shape])
            return layout.structure(tensors)

        def epoch(number: tf.Tensor) -> tf.data.Dataset:
            def several(step: tf.Tensor) -> Any:
                return load(number, step, tf.minimum(step + together, batches.complete))

            def one(step: tf.Tensor) -> Any:
                return load(number, step, step + 1)

            epoch_dataset = tf.data.Dataset.range(first, batches.complete, together).map(several)
            if together > 1:
                constant = sizes[0] if len(sizes) == 1 else sizes
                epoch_dataset = epoch_dataset.prefetch(1).rebatch(
                    constant, drop_remainder=batches.constant_rows is not None
                )
            if batches.number > batches.complete:
                epoch_dataset = epoch_dataset.concatenate(
                    tf.data.Dataset.range(max(first, batches.complete), batches.number).map(one)
                )
            return epoch_dataset

        counted = epochs.flat_map(epoch).apply(tf.data.experimental.assert_cardinality(batches.number - first))
        return counted.prefetch(_READ_AHEAD_BATCHES).with_options(options)

    dataset = SelectableDataset(build, Selection(streams=streams), batch_size)
    if number_of_readers() > 1 and has_unseeded(random_seeds(dataset)):
        warnings.warn(
            "Workers shuffle rows in different orders. If a worker reads all rows and uses its part of a batch, some "
            "rows are used twice in an epoch and others not at all. Received: `shuffle` without a seed, and several "
            "workers in the environment. Expected: one seed for all workers. Create a strategy of tfdist before the "
            "dataset, call `keras.utils.set_random_seed` with the same number on all workers, or give `seed`.",
            RuntimeWarning,
            stacklevel=3,
        )
    return dataset


def _batches_of_call(layout: BatchLayout, rows: int) -> int:
    """Returns how many batches of `rows` rows one call of Python reads, which takes as long as many rows."""
    return max(1, min(_MOST_BATCHES_OF_CALL, _BYTES_OF_CALL // max(layout.row_bytes * rows, 1)))


def number_of_readers() -> int:
    """Returns how many workers share the batches of a training, as the environment says: 1 without a cluster.

    After a restart with fewer workers it is the number that `tfdist run` was to start, so that batches stay the same.
    """
    config = cluster.detect()
    jobs = {} if config is None else config.cluster.jobs
    if "ps" in jobs or ("chief" in jobs and "TFDIST_RUN_ID" in os.environ):
        return 1  # one process draws all batches
    present = sum(len(jobs.get(job, ())) for job in ("chief", "worker"))
    return max(present, cluster.requested_workers() or 1, 1)
