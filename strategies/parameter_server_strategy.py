"""ParameterServerStrategy: workers compute, parameter servers hold the variables."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import cluster
from tfdist.collectives import CommunicationStats
from tfdist.compression import Policy
from tfdist.keras_internals.optimizers import OptimizerUpdate, build_outside_trace
from tfdist.keras_internals.placed_variables import keras_creates_variable
from tfdist.keras_internals.strategy_patches import patch_keras
from tfdist.load_balancing.share_planning import LoadBalancing, load_balancing_of
from tfdist.losses.divided_rows import DividedRows
from tfdist.parameter_server.batch_split import PartShares
from tfdist.parameter_server.chief import ChiefTraining
from tfdist.parameter_server.client_training import LocalSteps
from tfdist.parameter_server.federated_chief import FederatedChief
from tfdist.parameter_server.gradient_push import update_directly
from tfdist.parameter_server.modes import Asynchronous, FederatedAveraging, Mode, Synchronous
from tfdist.parameter_server.push_statistics import StatsCollector, WorkerStats
from tfdist.parameter_server.unsupported_features import reject_while_workers_are_lost
from tfdist.parameter_server.worker_datasets import ClientDatasets, WorkerDatasets
from tfdist.parameter_server.worker_scope import WorkerScope, current_loss_step, look_up, num_parts
from tfdist.servers.server_monitor import wait_for_servers
from tfdist.servers.serving import serve
from tfdist.strategies.cluster_resolver import check_parameter_server_cluster, resolver_of, start_timeout_of
from tfdist.strategies.replicated_strategy import Compression
from tfdist.strategies.version_canaries import check_installed_versions
from tfdist.strategy_hooks import StrategyHooks, UpdateHooks
from tfdist.tensorflow_internals.cluster_coordinator import (
    Coordinator,
    allow_run_on_chief,
    has_coordinators,
    without_reconnecting,
)
from tfdist.tensorflow_internals.server_variables import balance_by_bytes
from tfdist.training.strategy_protocol import TrainingStrategy
from tfdist.utils.argument_checks import is_whole_number


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy, TrainingStrategy):
    """Training in which parameter servers hold the variables and workers, which may be lost and return, compute.

    It makes `tf.distribute.ParameterServerStrategy` work with Keras 3: an unchanged program calls `compile`, `fit`,
    `evaluate` and `predict` on the chief. Start it by `tfdist run --workers N --parameter-servers M script.py`. Under
    another launcher that sets `TF_CONFIG`, run the script as every task: in the process of a worker or a parameter
    server this constructor serves until the chief has ended, then exits.

    ```python
    strategy = ParameterServerStrategy(mode=Synchronous(), compression="int8")
    with strategy.scope():
        model = build_model()
        model.compile("adam", loss=...)
    model.fit(x, y, epochs=3)
    ```

    Attributes:
        mode: `Asynchronous`, `Synchronous` or `FederatedAveraging`.
        policy: The compression policy.
        pull_dtype: As which dtype variables are sent to the workers, or `None`.
        gradient_accumulation_steps: How many batches a worker accumulates for a push.
        server_addresses: The "host:port" of each parameter server.
        coordinator: TensorFlow's `ClusterCoordinator`, for custom training loops.
        part_shares: The parts of a round that the workers compute.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Any = None,
        *,
        mode: Mode | None = None,
        compression: Compression = None,
        pull_dtype: str | None = None,
        gradient_accumulation_steps: int = 1,
        start_timeout_seconds: float | None = None,
        load_balancing: bool | LoadBalancing = False,
    ) -> None:
        """Connects the chief to the cluster, or serves as a worker or parameter server.

        Args:
            cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver`. By default the environment describes
                the cluster.
            variable_partitioner: As for TensorFlow's strategy; splits the tables of embedding layers, and each
                `tf.Variable` that the program creates in the scope, over the servers. Other variables of Keras stay
                whole.
            mode: How workers' updates are combined: `Asynchronous()`, the default, `Synchronous()`, or
                `FederatedAveraging(local_steps=...)`.
            compression: How gradients are encoded for the servers; as for MultiWorkerMirroredStrategy.
            pull_dtype: "bfloat16" or "float16" sends trainable variables to the workers in that dtype; by default
                they are sent unchanged.
            gradient_accumulation_steps: How many batches of `fit` a worker accumulates for one push.
            start_timeout_seconds: How long to wait for workers and servers. By default the value of
                `tfdist run --start-timeout`, or 300.
            load_balancing: Whether the parts of a batch follow the measured speeds of the workers, with
                `Synchronous()`; in asynchronous mode a faster worker takes more batches anyway. A `LoadBalancing` has
                options, whose steps are rounds. See `docs/load_balancing.md`.

        Raises:
            ValueError: An argument or the environment's description of the cluster is wrong.
            TimeoutError: Workers or servers did not start in time; the message names them.
            RuntimeError: This process has another such strategy, and one of its workers is lost.
        """
        self.mode: Mode = Asynchronous() if mode is None else mode
        self.policy = compression if isinstance(compression, Policy) else Policy(compression)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        resolver = cluster_resolver or _resolver_of_environment()
        spec = resolver.cluster_spec().as_dict()
        check_parameter_server_cluster(spec, resolver.task_type, resolver.task_id)
        self._num_workers = len(spec.get("worker", ()))
        self.server_addresses = tuple(spec.get("ps", ()))
        self.pull_dtype = _checked(self.mode, self.policy, pull_dtype, gradient_accumulation_steps, self._num_workers)
        _check_partitioner(variable_partitioner, self.mode)
        self.part_shares = _part_shares(load_balancing, self.mode, self._num_workers)
        if resolver.task_type in ("worker", "ps"):
            serve(spec, resolver.task_type, resolver.task_id)
            sys.exit(0)
        wait_for_servers(spec, start_timeout_of(start_timeout_seconds))
        with without_reconnecting() as may_connect:
            if has_coordinators():
                reject_while_workers_are_lost(spec["worker"], may_connect)
            super().__init__(resolver, variable_partitioner)
        balance_by_bytes(self, keeps_whole=keras_creates_variable)
        allow_run_on_chief(self)
        self.variable_partitioner = variable_partitioner
        self.coordinator = Coordinator(self)
        self._stats = StatsCollector(self._num_workers)
        self.divided_rows = DividedRows(1)
        patch_keras(ParameterServerStrategy, HOOKS)
        check_installed_versions(is_chief=True)

    @property
    def num_workers(self) -> int:
        """The number of workers, without the chief and the servers."""
        return self._num_workers

    @property
    def replicas_of_workers(self) -> tuple[int, ...]:
        """1 for each worker, which computes on one device."""
        return (1,) * self._num_workers

    @property
    def communication(self) -> CommunicationStats:
        """What all workers have pushed so far, with the pushes as `gradient_collectives`.

        One asynchronous push, or one synchronous round of pushes, is an update. `dense_bytes` is not counted.
        """
        stats = self.worker_stats
        pushed = sum(worker.bytes_pushed for worker in stats)
        pushes = sum(worker.steps for worker in stats)
        return CommunicationStats(
            gradient_collectives=pushes, gradient_bytes=pushed, wire_bytes=pushed, updates=self._stats.updates
        )

    @property
    def worker_stats(self) -> tuple[WorkerStats, ...]:
        """What each worker has done so far: pushes, samples, staleness, bytes, time."""
        return self._stats.stats

    @property
    def server_bytes(self) -> tuple[int, ...]:
        """How many bytes of variables each server holds, without `server_optimizer_bytes`."""
        return tuple(self.extended.server_bytes)

    @property
    def server_optimizer_bytes(self) -> tuple[int, ...]:
        """How many bytes of optimizers' variables each server holds, such as Adam's moments.

        In `Synchronous` mode a server also holds gradient buffers: for each of its trainable variables one gradient
        per worker, or two with backup workers. They are not included.
        """
        return tuple(self.extended.colocated_bytes)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns `dataset`: the chief draws from it and gives its batches to the workers."""
        del options
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any = None) -> Any:
        """Creates a dataset on each worker, so that no sample passes through the chief.

        Args:
            dataset_fn: Called on each worker with a `tf.distribute.InputContext`; returns a dataset of batches, for
                `fit` an infinite one. It is the same for all workers, so shuffle without a seed. In the mode
                `FederatedAveraging` it is called for each client, whose number is `input_pipeline_id`.
            options: Not used by `fit`.

        Returns:
            Data for `fit`, or for `coordinator.create_per_worker_dataset`. In a `tf.function`, TensorFlow's
            distributed dataset.
        """
        if tf.inside_function():
            return super().distribute_datasets_from_function(dataset_fn, options)
        if isinstance(self.mode, FederatedAveraging):
            return ClientDatasets(dataset_fn, self, self.mode.num_clients(self._num_workers))
        return WorkerDatasets(dataset_fn, self.coordinator)


def _resolver_of_environment() -> Any:
    config = cluster.detect()
    if config is None or "ps" not in config.cluster.jobs:
        raise ValueError(
            "There is no cluster with parameter servers. Received: "
            f"{'no TF_CONFIG' if config is None else f'a cluster of {sorted(config.cluster.jobs)}'}. Expected: "
            "TF_CONFIG with the jobs chief, worker and ps. Start the script by tfdist run --workers 2 "
            "--parameter-servers 1 script.py."
        )
    return resolver_of(config)


def _part_shares(load_balancing: Any, mode: Mode, workers: int) -> PartShares:
    options = load_balancing_of(load_balancing)
    if options is not None:
        options.limits(workers)
        if mode != Synchronous():
            raise ValueError(
                "Parts follow the speeds of the workers in rounds that wait for all of them. Received: "
                f"load_balancing={load_balancing!r} with mode={mode!r}. Expected: mode=Synchronous() without backup "
                "workers. In asynchronous mode a faster worker takes more batches anyway; leave `load_balancing` out."
            )
    return PartShares(workers, options)


def _check_partitioner(partitioner: Any, mode: Mode) -> None:
    if partitioner is not None and isinstance(mode, FederatedAveraging):
        raise ValueError(
            "Clients train on whole variables. Received: a `variable_partitioner` with FederatedAveraging. Expected: "
            "variable_partitioner=None. Each variable is placed on the server with the fewest bytes."
        )
    if partitioner is not None and not callable(partitioner):
        raise ValueError(
            f"Invalid `variable_partitioner`. Received: {partitioner!r}. Expected: one of "
            "tf.distribute.experimental.partitioners, or None."
        )


def _checked(
    mode: Mode, policy: Policy, pull_dtype: str | None, gradient_accumulation_steps: int, workers: int
) -> tf.DType | None:
    if not isinstance(mode, Asynchronous | Synchronous | FederatedAveraging):
        raise ValueError(
            f"Invalid `mode`. Received: {mode!r}. Expected: tfdist.strategies.Asynchronous(), Synchronous() or "
            "FederatedAveraging(local_steps=...)."
        )
    if isinstance(mode, FederatedAveraging):
        mode.check_clients(workers)
        if gradient_accumulation_steps != 1:
            raise ValueError(
                "A client updates its own weights after every batch. Received: FederatedAveraging with "
                f"gradient_accumulation_steps={gradient_accumulation_steps!r}. Expected: 1. Use larger batches in "
                "`dataset_fn`."
            )
    if isinstance(mode, Synchronous) and mode.backup_workers >= max(workers, 1):
        raise ValueError(
            f"Rounds would wait for no worker. Received: {mode!r} with {workers} workers. Expected: fewer backup "
            "workers than workers."
        )
    steps = gradient_accumulation_steps
    if not is_whole_number(steps, at_least=1):
        raise ValueError(
            f"Invalid `gradient_accumulation_steps`. Received: {steps!r}. Expected: a whole number of at "
            "least 1, the number of batches that a worker accumulates for a push."
        )
    if policy.dense_steps:
        raise ValueError(
            f"A push is encoded from the first step on. Received: a policy with dense_steps={policy.dense_steps}. "
            "Expected: dense_steps=0."
        )
    if pull_dtype not in (None, "bfloat16", "float16"):
        raise ValueError(f"Invalid `pull_dtype`. Received: {pull_dtype!r}. Expected: 'bfloat16', 'float16' or None.")
    return None if pull_dtype is None else tf.as_dtype(pull_dtype)


def _update(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    scope, steps = WorkerScope.current(), LocalSteps.current()
    if steps is not None:
        optimizer.apply(optimizer.clip(steps.gradients(optimizer, gradients)))
    elif scope is None:  # a custom training loop, which schedules its functions itself
        update_directly(optimizer, gradients)
    else:
        scope.push(optimizer, gradients)


def _apply(apply: Callable[[list[Any]], None], gradients: list[Any], _: list[bool]) -> None:
    scope = WorkerScope.current()
    with contextlib.nullcontext() if scope is None else scope.in_update():
        apply(gradients)


def _build(optimizer: Any, variables: list[Any]) -> None:
    if WorkerScope.current() is not None:
        build_outside_trace(optimizer, variables)


def _chief_training(model: Any) -> ChiefTraining:
    strategy = model.distribute_strategy
    kind = FederatedChief if isinstance(strategy.mode, FederatedAveraging) else ChiefTraining
    return kind(model, strategy._stats)


def _look_up(parts: Sequence[Any], ids: tf.Tensor) -> tf.Tensor | None:
    is_local = LocalSteps.current() is not None  # a client has a copy of the table
    return None if is_local else look_up(parts, ids)


HOOKS = StrategyHooks(
    current_step=current_loss_step,
    compiles_calls=WorkerScope.compiles_calls,
    scope_of_step=WorkerScope.current,
    optimizers=UpdateHooks(_update, _apply, _build),
    on_error=lambda strategy, error: strategy.divided_rows.explain(error),
    sent_bytes=lambda strategy: strategy.communication.wire_bytes,
    training=_chief_training,
    look_up=_look_up,
    num_shards=lambda strategy, shape: num_parts(strategy.variable_partitioner, shape),
)
