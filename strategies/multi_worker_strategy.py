"""MultiWorkerMirroredStrategy: trains on the devices of many processes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.collectives.key_values import key_values
from tfdist.load_balancing.row_shares import RowShares
from tfdist.load_balancing.share_planning import LoadBalancing, checked_shares, load_balancing_of
from tfdist.local_updates.local_modes import DiLoCo, LocalMode, LocalSGD
from tfdist.local_updates.local_updates import LocalUpdates
from tfdist.parameter_server.modes import Synchronous
from tfdist.sharded_state.state_sharding import ShardedState
from tfdist.strategies.cluster_resolver import (
    check_workers_run_the_script,
    is_elastic_run,
    peer_addresses,
    silence_limit_of_environment,
    start_timeout_of,
    worker_resolver,
)
from tfdist.strategies.elastic_training import ElasticTraining, check_elastic_options
from tfdist.strategies.exchange_start import own_process, workers_boundary
from tfdist.strategies.replicated_strategy import Compression, ReplicatedStrategy
from tfdist.strategies.shared_paths import patch_files
from tfdist.strategies.version_canaries import check_installed_versions
from tfdist.strategies.worker_start import (
    agree_on_random_seed,
    compare_cpus,
    default_micro_batches,
    devices_of_workers,
    exit_on_timeout,
)
from tfdist.tensorflow_internals.batch_selection import selectable
from tfdist.tensorflow_internals.rows_per_replica import mark_complete
from tfdist.tensorflow_internals.runtime import (
    ClusterKeyValues,
    cluster_is_running,
    silence_limit,
    tensorflow_has_started,
)
from tfdist.tensorflow_internals.strategy_extended import (
    EqualOnAllReplicas,
    ReplicaMultiWorkerExtended,
)
from tfdist.training.batch_comparison import BatchComparison, draws_common_batches
from tfdist.training.sample_shares import current_step
from tfdist.training.worker_batches import batch_traits, complete_batches, counted_batches, worker_batches
from tfdist.utils.argument_checks import check_whole_number

_UNKNOWN = -1
_PER_WORKER = tf.distribute.InputReplicationMode.PER_WORKER
_NCCL = tf.distribute.experimental.CommunicationImplementation.NCCL


class MultiWorkerMirroredStrategy(ReplicatedStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on all logical devices of many workers.

    A `tf.distribute.MultiWorkerMirroredStrategy` under which Keras 3 works: `fit`, `evaluate` and `predict` compute
    what one process computes on the concatenated batch. Start the script with `tfdist run --workers N script.py`, or
    with any launcher that sets `TF_CONFIG`, or Slurm's or Kubernetes' variables (see `tfdist.cluster`). Without them
    the strategy trains on the local devices alone.

    >>> from tfdist.strategies import MultiWorkerMirroredStrategy
    >>> strategy = MultiWorkerMirroredStrategy()
    >>> strategy.num_workers, strategy.rank
    (1, 0)
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        compression: Compression = None,
        bucket_bytes: int | None = None,
        shard_optimizer_state: bool | ShardedState = False,
        shard_weights: bool = False,
        start_timeout_seconds: float | None = None,
        micro_batches: int | None = None,
        load_balancing: bool | LoadBalancing = False,
        shares: Sequence[float] | None = None,
        mode: Synchronous | LocalMode | None = None,
        elastic: bool | None = None,
    ) -> None:
        """Creates the strategy, and connects this worker with all others.

        Args:
            cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver`. By default the environment describes
                the cluster.
            communication_options: A `tf.distribute.experimental.CommunicationOptions`. Workers exchange by tfdist's own
                connections, unless it requests NCCL, which needs GPUs; then TensorFlow's cluster is started, and the
                strategy must be created before anything else creates TensorFlow's devices. An exchange that takes
                longer than its `timeout_seconds` is an error that names the workers it waits for; by default there is
                no such limit, and lost or silent workers are errors.
            compression: The compression of gradients between workers: a `tfdist.compression.Compressor`, its name
                ("bf16", "powersgd:4"), a mapping from regular expressions over variable paths to these, or a
                `tfdist.compression.Policy`. No compression by default. See `docs/compression.md`.
            bucket_bytes: The size from which a bucket of gradients is sent, during backpropagation, in bytes. 0 sends
                all gradients at the end. By default `communication_options.bytes_per_pack` if given, else 4 MiB.
            shard_optimizer_state: Whether each replica holds the slots (moments, averages of weights) of its part of
                the variables only, updates that part, and receives the others. A `ShardedState` has options. See
                `docs/sharded_state.md`.
            shard_weights: Whether each replica holds its part of the weights only, and of all slots: those of a layer
                are gathered when it computes. As `shard_optimizer_state=ShardedState(weights=True)`.
            start_timeout_seconds: How many seconds the other workers may take to start. By default the value of
                `tfdist run --start-timeout`, else 300.
            micro_batches: The number of micro-batches into which each replica splits its part of a training step. They
                are computed one after another, for one update. By default 1; under `tfdist run --min-workers`, if the
                requested number of workers is a multiple of the present number, the quotient.
            load_balancing: Whether the rows of every global batch are divided by the measured speeds of the workers. A
                `LoadBalancing` has options. See `docs/load_balancing.md`.
            shares: How many rows of a global batch each worker computes, in proportion, by rank: `[1, 3]`. With
                `load_balancing`, those of the first steps. By default each device computes equally many.
            mode: `Synchronous()`, the default: workers exchange gradients in each update. `LocalSGD(sync_every=...)` or
                `DiLoCo(sync_every=...)`: each worker trains by itself, and weights are exchanged after many updates;
                `compression` then applies to differences of weights. See `docs/local_updates.md`.
            elastic: Whether a worker may be lost: the others take over its rows of the same batch and train on, and one
                that starts later joins them. By default under `tfdist run --elastic` only. See `docs/elastic.md`.

        Raises:
            ValueError: An argument or the cluster in the environment is invalid, or `tfdist run` has started a chief.
            RuntimeError: With NCCL, TensorFlow has already created its devices.
            HandshakeError: A worker has another `TFDIST_TOKEN`, or other addresses.
            JoinError: The others train already, with `elastic`, and do not answer.
            TimeoutError: A worker did not start in time. The message names it.
            OSError: The port of this worker is in use, or the name of a Slurm node does not resolve.
        """
        elastic = is_elastic_run(elastic)
        balancing = load_balancing_of(load_balancing)
        divides_rows = balancing is not None or shares is not None
        local_mode = _local_mode(mode, shard_optimizer_state or shard_weights, divides_rows=divides_rows)
        reduction = self._configure(
            bucket_bytes, communication_options, compression, shard_optimizer_state, shard_weights, joins_workers=True
        )
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        if elastic:
            nccl = options.implementation == _NCCL and communication_options
            check_elastic_options(
                communication_options=nccl,
                overlap_steps=0 if local_mode is None else local_mode.overlap_steps,
                shard_optimizer_state=shard_optimizer_state,
                shard_weights=shard_weights,
            )
        resolver = cluster_resolver or worker_resolver()
        spec = resolver.cluster_spec().as_dict()
        check_workers_run_the_script(spec)
        if self.shards_weights and options.implementation == _NCCL and peer_addresses(spec, resolver):
            raise ValueError(
                "With `shard_weights=True` workers agree on initial weights by tfdist's own exchange. Received: NCCL "
                "in `communication_options`, with several workers. Expected: one of the two. Leave NCCL out, or create "
                "the strategy with `shard_optimizer_state=True` alone."
            )
        limit_seconds = start_timeout_of(start_timeout_seconds)
        if micro_batches is not None:
            check_whole_number("micro_batches", micro_batches, at_least=1)
        key_values.limit_start(limit_seconds)
        if options.implementation == _NCCL:
            with _tensorflow_cluster(spec, resolver, limit_seconds):
                extended = ReplicaMultiWorkerExtended(self, resolver, options, reduction, devices_of_workers)
        else:
            boundary = workers_boundary(spec, resolver, limit_seconds, is_elastic=elastic)
            extended = ReplicaMultiWorkerExtended(self, resolver, options, reduction, devices_of_workers, boundary)
        tf.distribute.Strategy.__init__(self, extended)
        self._split_state()
        self._micro_batches = default_micro_batches(self.num_workers) if micro_batches is None else micro_batches
        if self.num_workers > 1:
            agree_on_random_seed(self.rank, self.num_workers, f"tfdist/seed/{self._collective_key_base}")
            compare_cpus(self.rank, self.num_workers, f"tfdist/cpu/{self._collective_key_base}")
            if not elastic:
                self._batch_comparison = BatchComparison(
                    self.rank, self.num_workers, f"tfdist/batches/{self._collective_key_base}"
                )
                self._batch_comparison.end_with(self)
            patch_files()
        is_elastic = elastic and self.num_workers > 1
        self.row_shares = self._shares_of(balancing, shares, process=own_process() if is_elastic else 0)
        if is_elastic:
            self._elastic = ElasticTraining(self)
        if local_mode is not None:
            self.extended.replica_operations.prepare_within_worker(self._reduction_within_worker)
            self.local_updates = LocalUpdates(self, local_mode, _samples_of_step)
        check_installed_versions(is_chief=self.rank == 0)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches into which each replica splits its part of a training step."""
        return self._micro_batches

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError(
            "MultiWorkerMirroredStrategy cannot be deep copied: it is connected with the other workers. Received: "
            "`copy.deepcopy` of it, or of an object that holds it. Expected: one strategy for all uses. Pass it on, or "
            "copy the weights of a model, with `keras.models.clone_model` and `set_weights`."
        )

    def synchronize(self, *models: Any) -> None:
        """Makes weights and batch statistics equal on all workers under `LocalSGD` and `DiLoCo`; else does nothing.

        `fit`, `evaluate` and `predict` do so by themselves. Call this in custom loops, on all workers after the same
        step, before weights are read: to save, to evaluate, at the end.

        Args:
            *models: The models that the loop trains, whose batch statistics become the mean of the workers'.
        """
        if self.local_updates is not None:
            self.local_updates.synchronize(models)

    @property
    def num_workers(self) -> int:
        """The number of workers; the largest that there may be under `tfdist run --elastic MIN:MAX`."""
        return self.extended.num_workers

    @property
    def rank(self) -> int:
        """The rank of this worker. The chief has rank 0."""
        return self.extended.rank

    @property
    def living_ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that train at the moment.

        With `elastic` those that were lost are missing; there are none while this worker has not joined the others.
        """
        return tuple(range(self.num_workers)) if self._elastic is None else self._elastic.living_ranks

    @property
    def may_lose_workers(self) -> bool:  # type: ignore[override]
        """Whether the others train on when a worker is lost: with `elastic`."""
        return self._elastic is not None

    def leave_others(self) -> None:
        """Leaves the others, with `elastic`; they train on."""
        if self._elastic is not None:
            self._elastic.leave()

    def values_of_workers(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of all workers, `[number of workers, ...]` by rank; zeros for those that are missing.

        All workers call this, outside of `run`.
        """
        rows = np.asarray(values).reshape(1, -1)
        boundary = self.extended.boundary
        if boundary is not None:
            rows = boundary.all_gather(tf.constant(rows)).numpy()
        elif self.num_workers > 1:
            rows = self.gather(tf.constant(rows), axis=0).numpy()
        return rows.reshape(self.num_workers, *values.shape)

    @property
    def replicas_of_workers(self) -> tuple[int, ...]:
        """The number of replicas of each worker, by rank: of its logical devices."""
        return self.extended.replicas_of_workers

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Distributes the global batches of a dataset; see `tf.distribute.Strategy.experimental_distribute_dataset`.

        If workers have different numbers of devices, each takes as many parts of a batch as it has devices. With
        `load_balancing` or `shares` the workers draw complete batches, and `run` gives each replica its rows.

        Raises:
            ValueError: The dataset has no batches, or its rows cannot be divided by shares.
        """
        counts = self.replicas_of_workers
        if self.row_shares is not None and isinstance(dataset, tf.data.Dataset):
            batches = complete_batches(self._compared(dataset), counts[self.rank], self.num_workers, self.rank)
            return mark_complete(self.extended.distribute_worker_batches(dataset, batches, False, options))
        reads_own_rows = self.num_workers > 1 and selectable(dataset) is not None
        compared = dataset
        is_divided = getattr(options, "experimental_replication_mode", _PER_WORKER) == _PER_WORKER
        if isinstance(dataset, tf.data.Dataset) and is_divided and not reads_own_rows and draws_common_batches(dataset):
            compared = self._compared(dataset)
        if not isinstance(dataset, tf.data.Dataset) or (len(set(counts)) == 1 and not reads_own_rows):
            if compared is dataset:
                return super().experimental_distribute_dataset(dataset, options)
            return self.extended.distribute_shown_batches(dataset, compared, options)
        batches, shards_files = worker_batches(compared, counts, self.rank)
        return self.extended.distribute_worker_batches(dataset, batches, shards_files, options)

    def _compared(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset with the same batches, which are compared with those of the other workers."""
        return dataset if self._batch_comparison is None else self._batch_comparison.shown(dataset)

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Distributes the datasets of workers; see `tf.distribute.Strategy.distribute_datasets_from_function`.

        Raises:
            ValueError: The strategy divides rows of common batches: with `load_balancing`, `shares` or `elastic`.
        """
        if self.row_shares is not None:
            raise ValueError(
                "Shares divide batches that all workers draw alike. Received: a function that creates the data of "
                "each worker. Expected: a dataset of global batches, for `fit` or `experimental_distribute_dataset`. "
                "Give the same dataset to all workers, or create the strategy without `load_balancing`, `shares` and "
                "`elastic`."
            )
        return super().distribute_datasets_from_function(dataset_fn, options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces over all replicas; see `ReplicatedStrategy.reduce`. Sends nothing if the values are equal already."""
        if isinstance(value, EqualOnAllReplicas):
            result = self.experimental_local_results(value)[0]
            is_sum = str(getattr(reduce_op, "value", reduce_op)).upper() == "SUM"
            return result * self.num_replicas_in_sync if is_sum else result
        return super().reduce(reduce_op, value, axis)

    def _wrap_results(self, results: Any) -> Any:
        # Keras would reduce each log over all workers again. `reduce` recognizes the wrapper and sends nothing.
        return tf.nest.map_structure(
            lambda value: EqualOnAllReplicas(list(self.experimental_local_results(value))), results
        )

    def _of_first_worker(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value of worker 0. All workers call this, eagerly."""
        boundary = self.extended.boundary
        return value if boundary is None else boundary.broadcast(value)

    def _shares_of(
        self, balancing: LoadBalancing | None, shares: Sequence[float] | None, *, process: int
    ) -> RowShares | None:
        if self.num_workers == 1:  # also where the program of a cluster runs alone
            return None
        checked = checked_shares(shares, self.num_workers)
        if balancing is not None:
            balancing.limits(self.num_workers)
        if balancing is None and checked is None and not process:
            return None
        host = self.extended.replica_operations.host
        counts = self.replicas_of_workers
        return RowShares(counts, self.rank, host, checked, balancing, process=process)

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on each replica; see `ReplicatedStrategy.run`.

        Raises:
            ValueError: With `elastic`, outside of the steps of Keras and of `ElasticLoop`.
        """
        if self._elastic is not None:
            self._elastic.check_runs_in_step()
        return super().run(fn, args, kwargs, options)

    def run_update(self, model: Any, update: Callable[[], None]) -> None:
        """Calls `update`, which updates a model between two steps; with `elastic` again if a worker is lost."""
        if self._elastic is None:
            update()
        else:
            self._elastic.run_update(model, update)

    def run_writing(self, update: Callable[[], None], find: Callable[[], Sequence[Any]]) -> None:
        """Calls `update`, which writes the `tf.Variable`s that `find` returns; with `elastic` again after a loss."""
        if self._elastic is None:
            update()
        else:
            self._elastic.run_writing(update, find)

    def _max_batches(self, own_batches: int | None) -> int | None:
        """Returns the largest number of batches of all workers, or `None` if a worker does not know its number.

        A worker at the end of its data computes empty batches, whose weight is 0, until all workers are at the end.
        """
        own_batches = super()._max_batches(own_batches)
        if self.num_workers == 1 or self._elastic is not None:
            return own_batches
        batches = [number for (number,) in self._of_workers([_UNKNOWN if own_batches is None else own_batches])]
        return None if _UNKNOWN in batches else max(batches)

    def _carry_counts(self, dataset: Any, own_batches: int | None) -> Any:
        """Returns the dataset whose batches carry their numbers of samples, as far as all workers can tell them."""
        if self.num_workers == 1:
            return dataset
        if self._elastic is not None:  # all workers have the same data, and need not ask each other
            return counted_batches(dataset, [batch_traits(dataset, own_batches)], 1, are_complete=True)
        traits = self._of_workers(batch_traits(dataset, own_batches))
        are_complete = self.row_shares is not None
        return counted_batches(dataset, traits, self.num_replicas_in_sync, are_complete=are_complete)

    def _of_workers(self, numbers: Sequence[int]) -> list[list[int]]:
        return self.gather(tf.constant([numbers], tf.int64), axis=0).numpy().tolist()


@contextlib.contextmanager
def _tensorflow_cluster(spec: dict[str, list[str]], resolver: Any, timeout_seconds: float) -> Iterator[None]:
    """Within this context a strategy starts TensorFlow's server, which NCCL needs, and waits for the other workers.

    Raises:
        RuntimeError: TensorFlow has already created its devices.
        TimeoutError: A worker did not start in time. The message names it.
    """
    peers = peer_addresses(spec, resolver)
    if not peers:
        yield
        return
    if not cluster_is_running():
        if tensorflow_has_started():
            raise RuntimeError(
                "With NCCL, MultiWorkerMirroredStrategy must be created before TensorFlow creates its devices. "
                f"Received: a cluster of {sum(map(len, spec.values()))} tasks (from TF_CONFIG or a scheduler's "
                "variables) after TensorFlow has started. Expected: the strategy is the first TensorFlow object that "
                "the program creates, and TF_CONFIG is set before. Move it above the first tensor, variable, dataset "
                "or `tf.config.list_logical_devices()`, or leave NCCL out of `communication_options`."
            )
        own_address, is_fixed = spec[resolver.task_type][resolver.task_id], cluster.is_slurm_step()
        cluster.wait_for_peers(own_address, peers, timeout_seconds, names_are_fixed=is_fixed)
    with exit_on_timeout(timeout_seconds), silence_limit(silence_limit_of_environment()):
        key_values.use(ClusterKeyValues())
        yield


def _local_mode(mode: Any, shards: Any, *, divides_rows: bool) -> LocalMode | None:
    """Returns the local mode that the argument `mode` demands; `None` if workers exchange in each update.

    Raises:
        ValueError: If it is invalid, or does not work together with `shard_optimizer_state` and `shard_weights`, one of
            which is given if `shards`, or with `load_balancing` or `shares`, one of which is given if `divides_rows`.
    """
    if mode is None or mode == Synchronous():
        return None
    if not isinstance(mode, LocalSGD | DiLoCo):
        raise ValueError(
            f"Invalid `mode` of MultiWorkerMirroredStrategy. Received: mode={mode!r}. Expected: Synchronous(), "
            "LocalSGD(sync_every=...) or DiLoCo(sync_every=...) of `tfdist.strategies`."
        )
    if shards:
        raise ValueError(
            "`shard_optimizer_state` and `shard_weights` do not work with local updates: each worker updates all "
            f"variables by itself, so it needs all slots. Received: one of them and mode={mode!r}. Expected: one of "
            "the two. Leave `shard_optimizer_state` and `shard_weights` out, or use `mode=Synchronous()`."
        )
    if divides_rows:
        raise ValueError(
            "`load_balancing` and `shares` do not work with local updates: rows are divided by times that workers "
            f"exchange in each step. Received: one of them and mode={mode!r}. Expected: one of the two. Leave "
            "`load_balancing` and `shares` out (a fast worker waits only where weights are exchanged), or use "
            "`mode=Synchronous()`."
        )
    return mode


def _samples_of_step() -> Any:
    """Returns the samples of this worker in the Keras step that is running; `None` in a custom loop."""
    step = current_step()
    return None if step is None else step.samples_of_worker
