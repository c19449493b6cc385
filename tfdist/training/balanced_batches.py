"""Batches of which all workers hold all rows: the rows that each replica computes, and the reports about them."""

import logging
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.model_introspection import first_input
from tfdist.load_balancing.step_timer import TimedStep
from tfdist.tensorflow_internals.input_pipeline import calls_shard, reads_files
from tfdist.tensorflow_internals.rows_per_replica import is_complete, parts_of_complete
from tfdist.training.sample_shares import ReplicaStep, has_rows, number_of_samples, rows_between, tensors_in
from tfdist.training.worker_batches import check_has_batches, several_of_each

_log = logging.getLogger("tfdist")
_Policy = tf.data.experimental.AutoShardPolicy
_WEIGHTS_READ = 8
_has_warned_of_files = False


class SharedRows:
    """A batch whose rows are divided among all replicas by a strategy's shares.

    Attributes:
        own: The data with the rows of each local replica.
        whole: The data with all rows. A replica without rows computes with the first of them.
        steps: The local replicas' parts of the step.
    """

    def __init__(self, data: Any, strategy: Any) -> None:
        self._strategy, self._shares = strategy, strategy.row_shares
        self._first_replica = sum(strategy.replicas_of_workers[: strategy.rank])
        self.own, self.whole, self._rows, bounds = _divided(data, strategy)
        self.steps = [ReplicaStep(end - first, _fraction(end - first, self._rows)) for first, end in bounds]

    def start_timing(self, model: Any, data: Any, step: ReplicaStep) -> TimedStep:
        """Starts to time a training step of a local replica."""
        timer = self._shares.timers[self._local_replica()]
        return timer.start(tensors_in(data), _some_weights(model), step.samples)

    def end_timing(self, model: Any, step: ReplicaStep) -> None:
        """Stores the time of a training step when its update is made."""
        if step.timing is not None:
            step.timing.end(_some_weights(model))

    def report(self, step: ReplicaStep) -> tf.Tensor:
        """Returns what this replica reports in the step."""
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
    """Returns `data` with the rows of each local replica in place of complete batches."""
    return _divided(data, strategy)[0] if is_complete(data) else data


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


def _divided(data: Any, strategy: Any) -> tuple[Any, Any, Any, list[tuple[Any, Any]]]:
    """Returns `data` with the rows of each local replica, with all rows, their number, and the bounds of replicas."""
    whole = tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], data)
    counted = first_input(whole)
    if counted is None or not has_rows(counted):
        marked = [leaf for leaf in tf.nest.flatten(data) if is_complete(leaf)]
        counted = next(leaf.values[0] for leaf in marked if has_rows(leaf.values[0]))
    rows = number_of_samples(counted)
    bounds = strategy.row_shares.bounds(rows)

    def part_of(leaves: list[Any], replica: int) -> list[Any]:
        return list(rows_between(leaves, counted, *bounds[replica]))

    return parts_of_complete(data, part_of), whole, rows, bounds


def _some_weights(model: Any) -> list[tf.Tensor]:
    """Reads weights that stand for all: each read is an operation, and an update changes them in any order."""
    weights = model.trainable_variables if model.built else []
    every = max(1, len(weights) // _WEIGHTS_READ)
    return [tf.convert_to_tensor(variable.value) for variable in [*weights[::every], *weights[-1:]]]


def _fraction(rows: Any, total: Any) -> Any:
    if isinstance(rows, int) and isinstance(total, int):
        return rows / max(total, 1)
    return tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(total, tf.float32))
