"""The batches of a worker's replicas where workers have different numbers of replicas."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.input_pipeline import constant_batch_size, reads_files
from tfdist.training.sample_shares import has_rows, rows_of_part

_Policy = tf.data.experimental.AutoShardPolicy


def worker_batches(
    dataset: tf.data.Dataset, replicas_of_workers: Sequence[int], rank: int
) -> tuple[tf.data.Dataset, bool]:
    """Returns the batches of a worker's replicas, one after another in each step.

    A global batch has one part for each replica of all workers, of nearly equal numbers of rows, in the order of the
    replicas. A worker that reads separate files takes as many rows of them.

    >>> batches = tf.data.Dataset.range(6).batch(6)
    >>> [[part.tolist() for part in worker_batches(batches, (1, 2), rank)[0].as_numpy_iterator()] for rank in range(2)]
    [[[0, 1]], [[2, 3], [4, 5]]]

    Args:
        dataset: The dataset of global batches that the user distributes.
        replicas_of_workers: The number of replicas of each worker.
        rank: The rank of this worker.

    Returns:
        The batches, and whether TensorFlow's auto-sharding must follow, which gives each worker separate files.
    """
    if not any(has_rows(leaf) for leaf in tf.nest.flatten(dataset.element_spec)):
        raise ValueError(
            "A dataset must have batches, whose rows are divided among the replicas. Received: a dataset with elements "
            f"{dataset.element_spec}. Expected: elements with a first dimension. Call the `batch` method of the "
            "dataset."
        )
    replicas, first, own = sum(replicas_of_workers), sum(replicas_of_workers[:rank]), replicas_of_workers[rank]
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _Policy.AUTO and not reads_files(dataset, len(replicas_of_workers), rank):
        policy = _Policy.DATA
    batch_size = constant_batch_size(dataset)
    if policy != _Policy.DATA and batch_size is not None:
        ends = [part * batch_size // replicas for part in range(replicas + 1)]
        sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        return dataset.rebatch(sizes[first : first + own]), True
    return _own_parts(dataset, first, own, replicas), policy != _Policy.DATA


def _own_parts(dataset: tf.data.Dataset, first: int, own: int, replicas: int) -> tf.data.Dataset:
    """Returns parts `first` to `first + own` of the `replicas` parts of each batch, one after another."""
    spec = dataset.element_spec

    def parts(*batch: Any) -> tf.data.Dataset:
        data = tf.nest.pack_sequence_as(spec, tf.nest.flatten(batch))
        counted = next(leaf for leaf in tf.nest.flatten(data) if has_rows(leaf))
        numbers = tf.data.Dataset.range(first, first + own, output_type=tf.int32)
        return numbers.map(lambda part: rows_of_part(data, counted, part, replicas))

    batches = int(dataset.cardinality())
    result = dataset.flat_map(parts)
    if batches == tf.data.UNKNOWN_CARDINALITY:
        return result
    number = batches if batches == tf.data.INFINITE_CARDINALITY else batches * own
    return result.apply(tf.data.experimental.assert_cardinality(number))
