"""The `tf.data` pipeline over a reader: epochs, steps, batches."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.data.batch_reader import BatchReader
from tfdist.data.row_order import BatchRows
from tfdist.data.tensor_layout import BatchLayout, TensorFormat
from tfdist.tensorflow_internals.batch_selection import SelectableDataset, Selection
from tfdist.tensorflow_internals.input_pipeline import has_unseeded, random_seeds
from tfdist.utils.argument_checks import optional_integer_variable

_READ_AHEAD_BATCHES = 4
_MOST_BATCHES_OF_CALL = 64
_BYTES_OF_CALL = 2 << 20


def batch_pipeline(
    reader: BatchReader,
    layout: BatchLayout,
    batch_size: int,
    *,
    seed: int | None,
    drop_remainder: bool,
    streams: int,
) -> tf.data.Dataset:
    """Returns the dataset of batches.

    Each element of its source is the number of a batch, with a number for the epoch, so a batch depends on nothing that
    was read before it.

    Args:
        reader: Reads batches.
        layout: What a batch consists of.
        batch_size: The number of rows of a global batch.
        seed: As of `tf.data.Dataset.shuffle`.
        drop_remainder: Whether a last batch with fewer rows is left out.
        streams: The number of streams of rows.
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

        def read(number: np.int64, step: np.int64, last: np.int64) -> Sequence[np.ndarray]:
            return reader.read(batches, int(number), int(step), int(last))

        def load(number: tf.Tensor, step: tf.Tensor, last: tf.Tensor) -> Any:
            tensors = tf.numpy_function(read, [number, step, last], [*map(_dtype, layout.tensors)])
            for tensor, expected in zip(tensors, layout.tensors, strict=True):
                tensor.set_shape([batches.constant_rows if together == 1 else None, *expected.shape])
            return layout.structure(tensors)

        def epoch(number: tf.Tensor) -> tf.data.Dataset:
            def several(step: tf.Tensor) -> Any:
                return load(number, step, tf.minimum(step + together, batches.complete))

            def one(step: tf.Tensor) -> Any:
                return load(number, step, step + 1)

            found = tf.data.Dataset.range(first, batches.complete, together).map(several)
            if together > 1:
                constant = sizes[0] if len(sizes) == 1 else sizes
                found = found.prefetch(1).rebatch(constant, drop_remainder=batches.constant_rows is not None)
            if batches.number > batches.complete:
                found = found.concatenate(tf.data.Dataset.range(max(first, batches.complete), batches.number).map(one))
            return found

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
    if "ps" in jobs or ("chief" in jobs and _is_started_by_launcher()):
        return 1  # one process draws all batches
    present = sum(len(jobs.get(job, ())) for job in ("chief", "worker"))
    remedy = "Start the workers with `tfdist run`, which sets it, or unset it."
    return max(present, optional_integer_variable(os.environ, "TFDIST_FULL_WORKERS", remedy=remedy) or 1, 1)


def _is_started_by_launcher() -> bool:
    return "TFDIST_RUN_ID" in os.environ


def _dtype(tensor: TensorFormat) -> tf.DType:
    return tf.string if tensor.dtype == object else tf.as_dtype(tensor.dtype)
