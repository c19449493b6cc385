"""ParameterServerStrategy: workers compute, servers hold the variables."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import cluster
from tfdist.compression import Policy
from tfdist.keras_internals.embeddings import install_tables
from tfdist.keras_internals.epoch_iterator import install_local_build
from tfdist.keras_internals.losses import install_loss_scaling
from tfdist.keras_internals.optimizers import OptimizerUpdate, install_update
from tfdist.keras_internals.progress_bar import install_progress_bar
from tfdist.keras_internals.scheduled_training import build_elsewhere, install_scheduled_training
from tfdist.keras_internals.sent_updates import install_sent_updates
from tfdist.parameter_server.modes import Asynchronous, Mode, Synchronous
from tfdist.parameter_server.refusals import refuse_while_workers_are_lost
from tfdist.parameter_server.serving import serve, wait_for_servers
from tfdist.parameter_server.tables import look_up
from tfdist.parameter_server.tally import Tally, WorkerCount
from tfdist.parameter_server.training import Training
from tfdist.parameter_server.worker_datasets import WorkerDatasets
from tfdist.parameter_server.worker_scope import WorkerScope, current_loss_step
from tfdist.strategies.environment import resolver_of, start_timeout_seconds
from tfdist.strategies.keras_strategy import Compression
from tfdist.tensorflow_internals.parameter_server import (
    Coordinator,
    balance_by_bytes,
    has_coordinators,
    may_run_on_chief,
    without_reconnecting,
)
from tfdist.versions import check_versions

_installed = False


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Training whose variables live on servers, and whose workers may come, go, and be of any speed.

    A `tf.distribute.ParameterServerStrategy` under which Keras 3 works: `compile`, `fit`, `evaluate` and `predict` of
    an unchanged program, on the chief. Started by `tfdist run --workers N --parameter-servers M script.py`; under any
    other launcher that sets `TF_CONFIG` the script may run as every task: in a worker's or server's process this
    constructor serves until the chief is done, and ends the process.

    ```python
    strategy = ParameterServerStrategy(mode=Synchronous(), compression="int8")
    with strategy.scope():
        model = build_model()
        model.compile("adam", loss=...)
    model.fit(x, y, epochs=3)
    ```
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Any = None,
        *,
        mode: Mode | None = None,
        compression: Compression = None,
        pull: str | None = None,
        accumulation_steps: int = 1,
        start_timeout: float | None = None,
    ) -> None:
        """Connects to workers and servers, or is one of them.

        Args:
          cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; if `None`, the environment is asked.
          variable_partitioner: as for TensorFlow's strategy; splits the tables of embedding layers over the servers.
          mode: how updates come together: `Asynchronous()` by default, or `Synchronous()`.
          compression: how gradients are encoded on their way to the servers; as for MultiWorkerMirroredStrategy.
          pull: "bfloat16": trainable variables travel to the workers as that; by default as they are.
          accumulation_steps: how many batches of `fit` a worker adds up before it pushes.
          start_timeout: how many seconds the servers may take to come up; `tfdist run --start-timeout` by default, else
            300.

        Raises:
          ValueError: an argument or the environment's description of the cluster is wrong.
          TimeoutError: workers or servers did not come up in time; the message names them.
          RuntimeError: this process has such a strategy already, and one of its workers is lost.
        """
        self.mode: Mode = Asynchronous() if mode is None else mode
        self.policy = compression if isinstance(compression, Policy) else Policy(compression)
        self.accumulation_steps = accumulation_steps
        resolver = cluster_resolver or _resolver_of_environment()
        spec = resolver.cluster_spec().as_dict()
        self.workers = len(spec.get("worker", ()))
        self.server_addresses = tuple(spec.get("ps", ()))
        self.pull_dtype = _checked(self.mode, self.policy, pull, accumulation_steps, self.workers)
        check_versions()
        if resolver.task_type in ("worker", "ps"):
            serve(spec, resolver.task_type, resolver.task_id)
            sys.exit(0)
        wait_for_servers(spec, start_timeout_seconds(start_timeout))
        with without_reconnecting() as may_connect:
            if has_coordinators():
                refuse_while_workers_are_lost(spec["worker"], may_connect)
            super().__init__(resolver, None)
        balance_by_bytes(self)
        may_run_on_chief(self)
        self.variable_partitioner = variable_partitioner
        self.coordinator = Coordinator(self)
        self.tally = Tally(self.workers)
        self.first_server = "/job:ps/task:0/device:CPU:0"
        _install_once()

    @property
    def worker_counts(self) -> tuple[WorkerCount, ...]:
        """What each worker has done so far: pushes, samples, staleness, bytes."""
        return self.tally.counts

    @property
    def server_bytes(self) -> tuple[int, ...]:
        """How many bytes of variables each server holds, without `server_optimizer_bytes`."""
        return tuple(self.extended.server_bytes)

    @property
    def server_optimizer_bytes(self) -> tuple[int, ...]:
        """How many bytes each server holds of what optimizers keep beside a variable, as Adam's moments.

        Beside these it holds the parts of rounds of `Synchronous`: for each of its trainable variables one gradient a
        worker, with backup workers two.
        """
        return tuple(self.extended.beside_bytes)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns `dataset`: the chief draws from it and gives its batches to the workers."""
        del options
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any = None) -> Any:
        """A data set on each worker, made by `dataset_fn(input_context)` there, so that no sample passes the chief.

        Args:
          dataset_fn: returns an infinite data set of batches. All workers make the same: shuffle without a seed.
          options: not used.
        """
        del options
        return WorkerDatasets(dataset_fn, self.coordinator)

    def new_worker_variable(self, value: tf.Tensor) -> tf.Variable:
        """A variable that each worker has for itself."""
        with self.scope():
            return tf.Variable(value, trainable=False, per_worker_variable=True)

    def paths_of(self, optimizer: Any, variables: Sequence[Any]) -> list[str]:
        """The names of variables by which compression knows them."""
        return OptimizerUpdate(getattr(optimizer, "inner_optimizer", optimizer), variables).paths


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


def _checked(mode: Mode, policy: Policy, pull: str | None, accumulation_steps: int, workers: int) -> tf.DType | None:
    if not isinstance(mode, Asynchronous | Synchronous):
        raise ValueError(
            f"`mode` is no mode. Received: {mode!r}. Expected: tfdist.strategies.Asynchronous() or Synchronous()."
        )
    if isinstance(mode, Synchronous) and mode.backup_workers >= max(workers, 1):
        raise ValueError(
            f"No worker would be waited for. Received: {mode!r} with {workers} workers. Expected: fewer backup workers "
            "than workers."
        )
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
        raise ValueError(
            f"`accumulation_steps` is no number of batches. Received: {accumulation_steps!r}. Expected: a whole number "
            "of at least 1."
        )
    if policy.dense_steps:
        raise ValueError(
            f"A push is encoded from the first step on. Received: a policy with dense_steps={policy.dense_steps}. "
            "Expected: dense_steps=0."
        )
    if pull not in (None, "bfloat16", "float16"):
        raise ValueError(f"`pull` is not known. Received: {pull!r}. Expected: 'bfloat16', 'float16' or None.")
    return None if pull is None else tf.as_dtype(pull)


def _is_ours(strategy: Any) -> bool:
    return isinstance(strategy, ParameterServerStrategy)


def _update(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    scope = WorkerScope.current()
    if scope is None:  # a loop of the user's own, which schedules its functions itself
        optimizer.apply(optimizer.clip(gradients))
    else:
        scope.push(optimizer, gradients)


def _build(optimizer: Any, variables: list[Any]) -> None:
    if WorkerScope.current() is not None:
        build_elsewhere(optimizer, variables)


def _look_up(parts: Sequence[Any], ids: tf.Tensor) -> tf.Tensor | None:
    return look_up(parts, ids) if _is_ours(tf.distribute.get_strategy()) else None


def _parts_of(shape: tuple[int, int]) -> int:
    strategy = tf.distribute.get_strategy()
    if not _is_ours(strategy) or strategy.variable_partitioner is None:
        return 1
    parts = strategy.variable_partitioner(shape=tf.TensorShape(shape), dtype=tf.float32)
    if not parts or parts[0] < 1 or any(part != 1 for part in parts[1:]):
        raise ValueError(
            f"A table is split by its rows. Received: {parts} from variable_partitioner for a table of {shape}. "
            "Expected: a number of at least 1, then ones, as tf.distribute.experimental.partitioners give."
        )
    return min(int(parts[0]), shape[0])


def _install_once() -> None:
    global _installed
    if not _installed:
        install_update(_is_ours, _update, lambda apply, gradients, _: apply(gradients), _build)
        install_loss_scaling(current_loss_step)
        install_sent_updates()
        install_scheduled_training(_is_ours, Training)
        install_tables(_look_up, _parts_of)
        install_progress_bar(_is_ours, lambda strategy: sum(count.bytes_pushed for count in strategy.worker_counts))
        install_local_build(_is_ours, lambda _: contextlib.nullcontext())
        _installed = True
