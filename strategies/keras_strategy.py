"""What every synchronous strategy of tfdist adds to TensorFlow's: right steps, right reductions, counted bytes."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.collectives import (
    DEFAULT_BUCKET_BYTES,
    CompressionState,
    Durations,
    Exchange,
    Levels,
    ReplicaReduction,
    TrafficCount,
)
from tfdist.compression import Compressor, Policy
from tfdist.keras_internals.epoch_iterator import install_epoch_iterator, install_local_build
from tfdist.keras_internals.losses import install_loss_scaling
from tfdist.keras_internals.models import bound_step, first_input, install_predict_on_batch, is_predict_step
from tfdist.keras_internals.optimizers import OptimizerUpdate, install_update
from tfdist.keras_internals.progress_bar import install_progress_bar
from tfdist.keras_internals.seeds import install_replica_seeds
from tfdist.tensorflow_internals.launcher import ReplicaLauncher
from tfdist.training.empty_batches import predict_on_replica
from tfdist.training.micro_batches import current_micro_batch
from tfdist.training.refusals import refuse_impossible
from tfdist.training.replica_steps import step_on_replicas
from tfdist.training.rows import is_distributed, rows_of_part
from tfdist.training.step import current_step
from tfdist.training.update import once_for_all_micro_batches, update_over_replicas
from tfdist.versions import check_versions

if TYPE_CHECKING:
    from tensorflow.distribute import Strategy as _Strategy
else:
    _Strategy = object

Compression = Policy | Compressor | str | Mapping[str, Compressor | str | None] | None

_FIRST_GROUP_KEY = 1 << 16
_GROUP_KEYS_PER_STRATEGY = 1 << 12
_strategies_made = itertools.count()
_installed = False


class KerasStrategy(_Strategy):
    """Mixed into a subclass of `tf.distribute.Strategy`, before it."""

    def _prepare(
        self, bucket_bytes: int | None, options: Any, compression: Compression
    ) -> Callable[..., ReplicaReduction]:
        """To be called before the base class makes its collectives; returns what reduces a replica's tensors."""
        policy = compression if isinstance(compression, Policy) else Policy(compression)
        if bucket_bytes is None:
            bucket_bytes = getattr(options, "bytes_per_pack", 0) or DEFAULT_BUCKET_BYTES
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0:
            raise ValueError(
                f"`bucket_bytes` is not a size. Received: bucket_bytes={bucket_bytes!r}. Expected: a number of bytes, "
                f"0 for one bucket, or None for `communication_options.bytes_per_pack`, else {DEFAULT_BUCKET_BYTES}."
            )
        _refuse_nccl_without_gpu(options)
        check_versions()
        _install_once()
        # Strategies with the same group keys meet in each other's collectives.
        self._collective_key_base = _FIRST_GROUP_KEY + _GROUP_KEYS_PER_STRATEGY * next(_strategies_made)
        self.gradient_exchange = Exchange()
        self._builds_locally = False
        self.compression_state = CompressionState()
        exchange, state = self.gradient_exchange, self.compression_state

        def reduction(
            everyone: ReplicaLauncher, between: ReplicaLauncher | None, local: ReplicaLauncher | None, number: int
        ) -> ReplicaReduction:
            state.num_replicas = everyone.size if local is None else everyone.size // local.size
            return ReplicaReduction(Levels(everyone, between, local, number), exchange, bucket_bytes, policy, state)

        return reduction

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each replica computes of its part of a training step, one after another."""
        return 1

    @property
    def communication(self) -> TrafficCount:
        """What this worker's first replica has handed to collectives so far."""
        return self.extended.replica_operations.reductions[0].traffic.count()

    @property
    def communication_by_method(self) -> dict[str, TrafficCount]:
        """What of `communication` were gradients, by the method that they were compressed with."""
        return self.extended.replica_operations.reductions[0].traffic.by_label()

    @property
    def values_by_method(self) -> dict[str, dict[str, int]]:
        """How many values each variable has whose gradients are counted, by method and by the variable's path."""
        return self.extended.replica_operations.reductions[0].traffic.values()

    @property
    def durations_by_method(self) -> dict[str, Durations]:
        """What encoding, exchange and decoding of gradients have taken on this worker's first replica, by method."""
        stopwatch = self.extended.replica_operations.reductions[0].stopwatch
        return {} if stopwatch is None else stopwatch.by_label()

    def time_communication(self, enabled: bool) -> None:
        """Whether functions that are traced from now on take the times of `durations_by_method`, from zero."""
        self.extended.replica_operations.reductions[0].time(enabled)

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on every replica, as `tf.distribute.Strategy.run` does.

        If `fn` is the bound `train_step` or `test_step` of a Keras model, the replicas' losses are weighted by their
        samples, and the logs returned are those over all replicas.

        Raises:
          ValueError: the model's step cannot run under this strategy; the message says why and what to do.
        """
        model, name = bound_step(fn)
        if model is None:
            return super().run(
                predict_on_replica(fn, first_input) if is_predict_step(fn) else fn, args, kwargs, options
            )
        refuse_impossible(model, self, self.extended.worker_devices, training=name == "train_step")
        replica_step = step_on_replicas(model, fn, args[0] if args else None, self)
        return self._shared_results(super().run(replica_step, args, kwargs, options))

    def _shared_results(self, results: Any) -> Any:
        return results

    @contextmanager
    def _building_locally(self) -> Iterator[None]:
        self._builds_locally = True
        try:
            yield
        finally:
            self._builds_locally = False

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces `value`, or every leaf of a structure, over all replicas; see `tf.distribute.Strategy.reduce`.

        Unlike the base class it takes structures, and rank-0 values with `axis=0`, which count as one element each.
        """
        if self._builds_locally:
            return tf.nest.map_structure(lambda leaf: self.experimental_local_results(leaf)[0], value)
        reduce_leaf = super().reduce
        return tf.nest.map_structure(lambda leaf: reduce_leaf(reduce_op, leaf, self._axis(leaf, axis)), value)

    def _axis(self, value: Any, axis: Any) -> Any:
        ranks = {getattr(getattr(local, "shape", None), "rank", 0) for local in self.experimental_local_results(value)}
        return None if ranks == {0} else axis

    def _rows_shared_out(self, inputs: Any) -> Any:
        """`inputs`, the same on all workers, with their rows in the order in which Keras puts results together."""
        local = len(self.extended.worker_devices)
        workers = self.num_replicas_in_sync // local
        first = first_input((inputs,))

        def rows(context: Any) -> Any:
            worker, replica = divmod(int(context.replica_id_in_sync_group), local)
            return rows_of_part(inputs, first, replica * workers + worker, self.num_replicas_in_sync)

        if self.num_replicas_in_sync == 1 or first is None or is_distributed(inputs):
            return inputs
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        first = first_input((inputs,))
        return self.experimental_distribute_values_from_function(rows)

    def _agreed_batches(self, own_batches: int | None) -> int | None:
        return own_batches


def _refuse_nccl_without_gpu(options: Any) -> None:
    nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
    if getattr(options, "implementation", None) == nccl and not tf.config.list_physical_devices("GPU"):
        raise ValueError(
            "NCCL reduces between GPUs only. Received: implementation=NCCL and no GPU. Expected: a visible GPU, or "
            "`CommunicationImplementation.RING` (or AUTO). Leave `communication_options` out to let tfdist choose."
        )


def _is_ours(strategy: Any) -> bool:
    return isinstance(strategy, KerasStrategy)


def _sent_bytes(strategy: Any) -> int | None:
    return strategy.communication.wire_bytes if strategy.num_replicas_in_sync > 1 else None


def _update(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    update_over_replicas(optimizer, gradients, optimizer.strategy.gradient_exchange)


@contextmanager
def _local_values(strategy: Any) -> Iterator[None]:
    if isinstance(strategy, KerasStrategy):
        with strategy._building_locally():
            yield
    else:
        yield


def _part() -> Any:
    micro_batch = current_micro_batch()
    return tf.distribute.get_replica_context().replica_id_in_sync_group if micro_batch is None else micro_batch.part


def _agree(strategy: Any, own_batches: int | None) -> int | None:
    return strategy._agreed_batches(own_batches) if isinstance(strategy, KerasStrategy) else own_batches


def _install_once() -> None:
    """Lets Keras ask the strategy where it has no hook of its own; other strategies go on as ever."""
    global _installed
    if not _installed:
        install_loss_scaling(current_step)
        install_update(_is_ours, _update, once_for_all_micro_batches)
        install_replica_seeds(_is_ours, _part)
        install_predict_on_batch(_is_ours, KerasStrategy._rows_shared_out)
        install_epoch_iterator(_agree)
        install_local_build(_is_ours, _local_values)
        install_progress_bar(_is_ours, _sent_bytes)
        _installed = True
