"""The batches of a worker's replicas: their static sizes, parts for unequal workers, and rows that shares divide."""

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.model_introspection import accepts_zeros, first_input
from tfdist.keras_internals.split_weight import held_on_replica
from tfdist.load_balancing.step_timer import TimedStep
from tfdist.tensorflow_internals.batch_selection import SelectableDataset
from tfdist.tensorflow_internals.input_pipeline import (
    asks_for_the_end,
    batch_types,
    calls_shard,
    constant_batch_size,
    is_per_worker,
    num_own_replicas,
    parts_of_dataset,
    reads_files,
)
from tfdist.tensorflow_internals.rows_per_replica import (
    can_count,
    carry_counts,
    carry_static_counts,
    has_static_sizes,
    is_carrier,
    is_complete,
    keep_static_sizes,
    know_ends,
    parts_of_complete,
    replica_spec,
)
from tfdist.training.sample_shares import (
    ReplicaStep,
    has_rows,
    number_of_samples,
    rows_between,
    rows_of_part,
    tensors_in,
)

_log = logging.getLogger("tfdist")
_Policy = tf.data.experimental.AutoShardPolicy
_UNKNOWN = int(tf.data.UNKNOWN_CARDINALITY)
_NEITHER, _ROWS, _ZEROS = range(3)
_WEIGHTS_READ = 8
_has_warned_of_files = False


def worker_batches(
    dataset: tf.data.Dataset, replicas_of_workers: Sequence[int], rank: int
) -> tuple[tf.data.Dataset, bool]:
    """Returns the batches of a worker's replicas, one after another in each step.

    A global batch has one part for each replica of all workers, of nearly equal numbers of rows, in the order of the
    replicas. A worker that reads separate files takes as many rows of them. Of a dataset that can be built for the rows
    of one worker, a worker reads only those.

    >>> batches = tf.data.Dataset.range(6).batch(6)
    >>> [[part.tolist() for part in worker_batches(batches, (1, 2), rank)[0].as_numpy_iterator()] for rank in range(2)]
    [[[0, 1]], [[2, 3], [4, 5]]]

    Returns:
        The batches, and whether TensorFlow's auto-sharding must follow, which gives each worker separate files.
    """
    check_has_batches(dataset)
    if isinstance(dataset, SelectableDataset):
        rows = dataset.select(replicas_of_workers=tuple(replicas_of_workers), rank=rank)
        own_replicas = replicas_of_workers[rank]
        return (rows if own_replicas == 1 else _own_parts(rows, 0, own_replicas, own_replicas)), False
    replicas, first, own_replicas = sum(replicas_of_workers), sum(replicas_of_workers[:rank]), replicas_of_workers[rank]
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _Policy.AUTO and not reads_files(dataset, len(replicas_of_workers), rank):
        policy = _Policy.DATA
    batch_size = constant_batch_size(dataset)
    if policy != _Policy.DATA and batch_size is not None:
        ends = [part * batch_size // replicas for part in range(replicas + 1)]
        sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        return dataset.rebatch(sizes[first : first + own_replicas]), True
    return _own_parts(dataset, first, own_replicas, replicas), policy != _Policy.DATA


def batch_traits(dataset: Any, batches: int | None) -> list[int]:
    """Returns what the workers must know about each other's batches for `counted_batches`, as numbers.

    These are the number of steps after which the data ends (negative: unknown), the sizes of the batches of a replica
    (0: not static), and how a replica without data can take part in a step: with zeros, or with rows that are counted.

    Where workers draw different data, one of them may end before the others, and its replicas compute on zeros. If an
    input is not a floating-point number, zeros may be invalid.
    """
    if not is_carrier(dataset):
        return [_UNKNOWN, 0, _NEITHER]
    sizes, is_divided = 0, not is_per_worker(dataset)
    kind = _ROWS if can_count(first_input(batch_types(dataset))) else _NEITHER
    if has_static_sizes(dataset):
        spec = replica_spec(dataset)
        sizes = zlib.crc32(repr(tf.nest.flatten(spec)).encode()) + 1
        kind = _ZEROS if is_divided or accepts_zeros(None, spec) else kind
    return [_number_of_steps(dataset, batches, is_divided), sizes, kind]


def counted_batches(dataset: Any, traits: Sequence[Sequence[int]], replicas: int, *, are_complete: bool) -> Any:
    """Returns the dataset whose batches carry their numbers of samples, as far as that is possible.

    `traits` are those of all workers. If batches `are_complete`, each worker computes a part of their rows.
    """
    steps, sizes, kinds = (set(values) for values in zip(*traits, strict=True))
    end_together = len(steps) == 1 and steps != {_UNKNOWN}
    have_equal_sizes = len(sizes) == 1 and sizes != {0}
    if are_complete:
        return know_ends(dataset) if end_together else dataset
    if end_together and have_equal_sizes:
        return carry_static_counts(dataset, replicas)
    if not asks_for_the_end(dataset):  # without an end: the exchange runs beside the forward pass
        return dataset
    if have_equal_sizes and kinds == {_ZEROS}:
        return keep_static_sizes(dataset)
    return dataset if _NEITHER in kinds else carry_counts(dataset, first_input(batch_types(dataset)))


def _number_of_steps(dataset: Any, batches: int | None, is_divided: bool) -> int:
    """Returns the number of steps after which a worker's data ends: of batches, if the worker draws parts of them."""
    devices = num_own_replicas(dataset)
    (own_batches,) = (int(part.cardinality()) for part in parts_of_dataset(dataset))
    if own_batches >= 0:
        return own_batches // devices if own_batches % devices == 0 else _UNKNOWN
    if own_batches == tf.data.INFINITE_CARDINALITY or not is_divided:
        return own_batches
    return int(dataset.cardinality) if batches is None else batches


def check_has_batches(dataset: tf.data.Dataset) -> None:
    """Raises a ValueError if the elements of a dataset have no rows to divide."""
    if not any(has_rows(leaf) for leaf in tf.nest.flatten(dataset.element_spec)):
        raise ValueError(
            "A dataset must have batches, whose rows are divided among the replicas. Received: a dataset with elements "
            f"{dataset.element_spec}. Expected: elements with a first dimension. Call the `batch` method of the "
            "dataset."
        )


def several_of_each(dataset: tf.data.Dataset, count: int, of_batch: Callable[[Any, tf.Tensor], Any]) -> tf.data.Dataset:
    """Returns a dataset with `count` elements for each batch of another one, whose number of batches is kept.

    >>> doubled = several_of_each(tf.data.Dataset.range(4).batch(2), 2, lambda batch, number: batch)
    >>> [batch.tolist() for batch in doubled.as_numpy_iterator()]
    [[0, 1], [0, 1], [2, 3], [2, 3]]

    `of_batch` takes a batch and the number of the element, an int32 scalar from 0.
    """
    spec = dataset.element_spec

    def elements(*batch: Any) -> tf.data.Dataset:
        data = tf.nest.pack_sequence_as(spec, tf.nest.flatten(batch))
        return tf.data.Dataset.range(count, output_type=tf.int32).map(lambda number: of_batch(data, number))

    batches = int(dataset.cardinality())
    result = dataset.flat_map(elements)
    if batches == tf.data.UNKNOWN_CARDINALITY:
        return result
    number = batches if batches == tf.data.INFINITE_CARDINALITY else batches * count
    return result.apply(tf.data.experimental.assert_cardinality(number))


def _own_parts(dataset: tf.data.Dataset, first: int, count: int, replicas: int) -> tf.data.Dataset:
    """Returns parts `first` to `first + count` of the `replicas` parts of each batch, one after another."""

    def part_of(data: Any, number: tf.Tensor) -> Any:
        counted = next(leaf for leaf in tf.nest.flatten(data) if has_rows(leaf))
        return _with_static_rows(rows_of_part(data, counted, first + number, replicas), data, replicas)

    return several_of_each(dataset, count, part_of)


def _with_static_rows(part: Any, batch: Any, replicas: int) -> Any:
    """Sets the sizes of a part of a batch whose static size is a multiple of the number of `replicas`."""
    for leaf, whole in zip(tf.nest.flatten(part), tf.nest.flatten(batch), strict=True):
        rows = whole.shape[0] if isinstance(leaf, tf.Tensor) and has_rows(whole) else None
        if rows is not None and rows % replicas == 0 and leaf.shape[0] is None:
            leaf.set_shape([rows // replicas, *leaf.shape[1:]])
    return part


class SharedRows:
    """A batch whose rows are divided among all replicas by a strategy's shares.

    Attributes:
        own: The data with the rows of each local replica.
        whole: The data with all rows. A replica without rows computes with the first of them.
        steps: The local replicas' parts of the step; of that of this worker alone if it is `within_worker`.
    """

    def __init__(self, data: Any, strategy: Any, *, within_worker: bool = False) -> None:
        self._strategy, self._shares = strategy, strategy.row_shares
        self._first_replica = sum(strategy.replicas_of_workers[: strategy.rank])
        self.own, self.whole, self._rows, bounds = _divided(data, strategy)
        total = bounds[-1][1] - bounds[0][0] if within_worker else self._rows
        self.steps = [ReplicaStep(end - first, _fraction(end - first, total)) for first, end in bounds]
        for step in self.steps if within_worker else ():
            step.samples_of_worker = tf.cast(total, tf.float32)

    def start_timing(self, model: Any, data: Any, step: ReplicaStep) -> TimedStep | None:
        if not self._shares.measures:
            return None
        timer = self._shares.timers[self._local_replica()]
        return timer.start(tensors_in(data), _some_weights(model), step.samples)

    def end_timing(self, model: Any, step: ReplicaStep) -> None:
        if step.timing is not None:
            step.timing.end(_some_weights(model))

    def report(self, step: ReplicaStep) -> tf.Tensor:
        measured = None if step.timing is None else step.timing.last
        return self._shares.report(self._first_replica + self._local_replica(), measured, step.samples)

    def check(self, reports: tf.Tensor) -> None:
        """Checks that all replicas together have computed each row of the batch once."""
        tf.debugging.assert_equal(
            reports[-1],
            tf.cast(self._rows, tf.float32),
            "The workers have drawn different batches. Expected: all workers draw the same batches, of which each "
            "computes its rows. Received: the rows that they have computed do not add up to the batch of this worker. "
            "Give all workers the same data, or create the strategy without `load_balancing` and `shares`.",
        )

    def _local_replica(self) -> int:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return int(tf.get_static_value(replica)) - self._first_replica


def own_rows(data: Any, strategy: Any) -> Any:
    """Returns `data` with the rows of each local replica in place of complete batches.

    A worker that repeats the steps of others computes on a row for each replica, and its results are not used: code of
    the program may not be able to compute on none.
    """
    return _divided(data, strategy, is_filled=True)[0] if is_complete(data) else data


def complete_batches(dataset: tf.data.Dataset, devices: int, workers: int, rank: int) -> tf.data.Dataset:
    """Returns a dataset of global batches, each once for every device of this worker.

    Raises:
        ValueError: The workers read different rows, which cannot be divided again; or the dataset has no batches.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy in (_Policy.FILE, _Policy.OFF, _Policy.HINT) or calls_shard(dataset):
        raise ValueError(
            "Shares divide batches that all workers draw alike. Received: a dataset of which each worker reads a part, "
            f"with AutoShardPolicy.{_Policy(policy).name}. Expected: the same dataset on all workers, with "
            "AutoShardPolicy.AUTO or DATA and without `shard`. Change its options, or create the strategy without "
            "`load_balancing` and `shares`."
        )
    check_has_batches(dataset)
    global _has_warned_of_files
    if policy == _Policy.AUTO and not _has_warned_of_files and rank == 0 and reads_files(dataset, workers, rank):
        _has_warned_of_files = True
        _log.warning(
            "Each worker reads all files, because load_balancing and shares divide the rows of common batches. Set "
            "AutoShardPolicy.DATA in the options of the dataset to say so."
        )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = _Policy.DATA
    dataset = dataset.with_options(options)
    return dataset if devices == 1 else several_of_each(dataset, devices, lambda data, number: data)


def _divided(data: Any, strategy: Any, *, is_filled: bool = False) -> tuple[Any, Any, Any, list[tuple[Any, Any]]]:
    """Returns `data` with the rows of each local replica, with all rows, their number, and the bounds of replicas."""
    whole = tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], data)
    counted = first_input(whole)
    if counted is None or not has_rows(counted):
        marked = [leaf for leaf in tf.nest.flatten(data) if is_complete(leaf)]
        counted = next(leaf.values[0] for leaf in marked if has_rows(leaf.values[0]))
    rows = number_of_samples(counted)
    bounds = strategy.row_shares.bounds(rows, is_filled=is_filled)

    def part_of(leaves: list[Any], replica: int) -> list[Any]:
        return list(rows_between(leaves, counted, *bounds[replica]))

    return parts_of_complete(data, part_of), whole, rows, bounds


def _some_weights(model: Any) -> list[tf.Tensor]:
    """Reads weights that stand for all: each read is an operation, and an update changes them in any order."""
    weights = model.trainable_variables if model.built else []
    every = max(1, len(weights) // _WEIGHTS_READ)
    return [tf.convert_to_tensor(held_on_replica(variable)) for variable in [*weights[::every], *weights[-1:]]]


def _fraction(rows: Any, total: Any) -> Any:
    if isinstance(rows, int) and isinstance(total, int):
        return rows / max(total, 1)
    return tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(total, tf.float32))
