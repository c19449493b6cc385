"""The base of the mirrored strategies: replicas with copies of the variables, which reduce their gradients."""

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.collectives import CommunicationStats, CompressionState
from tfdist.collectives.all_reduce import ReductionContext, ReplicaHierarchy, ReplicaReduction
from tfdist.collectives.buckets import DEFAULT_BUCKET_BYTES
from tfdist.compression import Compressor, Policy
from tfdist.elastic.step_transactions import WrittenVariables
from tfdist.elastic.step_variables import variables_of_steps
from tfdist.keras_internals.model_introspection import (
    bound_step,
    first_input,
    is_predict_step,
    predicting_model,
)
from tfdist.keras_internals.strategy_patches import patch_keras
from tfdist.local_updates.local_updates import LocalUpdates
from tfdist.losses.divided_rows import DividedRows
from tfdist.losses.replica_count import replica_count
from tfdist.sharded_state.state_sharding import ShardedState, StateSharding, sharded_state_of
from tfdist.sharded_state.weight_gathers import WeightGathers
from tfdist.strategies.replicated_hooks import HOOKS, keeps_order_of_rows
from tfdist.tensorflow_internals.aborted_collectives import check_collectives
from tfdist.tensorflow_internals.collective_launcher import ReplicaLauncher
from tfdist.tensorflow_internals.function_graphs import release_with
from tfdist.tensorflow_internals.rows_per_replica import is_complete, without_filled_rows
from tfdist.tensorflow_internals.runtime import exclude_from_autograph, is_read_by_user, reject_graphs_of_tensorflow_1
from tfdist.tensorflow_internals.xla_functions import reject_exchange_in_compiled_function
from tfdist.training.batch_comparison import BatchComparison
from tfdist.training.metric_totals import MetricTotals
from tfdist.training.replica_step import check_model, predict_on_replicas, step_on_replicas
from tfdist.training.sample_shares import has_samples, is_distributed, note_read_number, rows_of_part, time_wait
from tfdist.training.strategy_protocol import TrainingStrategy
from tfdist.training.worker_batches import own_rows
from tfdist.utils.argument_checks import is_whole_number

if TYPE_CHECKING:
    from tensorflow.distribute import Strategy as _Strategy

    from tfdist.strategies.elastic_training import ElasticTraining
else:
    _Strategy = object

Compression = Policy | Compressor | str | Mapping[str, Compressor | str | None] | None

_FIRST_GROUP_KEY = 1 << 16
_GROUP_KEYS_PER_STRATEGY = 1 << 12
_strategies_created = itertools.count()


class ReplicatedStrategy(TrainingStrategy, _Strategy):
    """Mixin for a subclass of `tf.distribute.Strategy`: correct Keras steps and reductions, counted bytes.

    Put it before TensorFlow's class in the list of bases.
    """

    _elastic: "ElasticTraining | None" = None  # how steps continue when workers are lost, if they do
    _builds_locally = False
    has_read_number = False  # whether the user's code has read the number of replicas
    state_sharding: StateSharding | None = None  # how the slots of optimizers are split over the replicas, if they are
    weight_gathers: WeightGathers | None = None  # likewise weights
    local_updates: LocalUpdates | None = None

    def _configure(
        self,
        bucket_bytes: int | None,
        options: Any,
        compression: Compression,
        shards_state: bool | ShardedState,
        shards_weights: bool,
        *,
        joins_workers: bool = False,
    ) -> Callable[..., ReplicaReduction]:
        """Checks the arguments and returns the factory of replica reductions.

        Call this before the base class creates its collectives.
        """
        reject_graphs_of_tensorflow_1()
        policy = compression if isinstance(compression, Policy) else Policy(compression)
        if bucket_bytes is None:
            bucket_bytes = getattr(options, "bytes_per_pack", 0) or DEFAULT_BUCKET_BYTES
        if not is_whole_number(bucket_bytes, at_least=0):
            raise ValueError(
                f"Invalid `bucket_bytes`. Received: bucket_bytes={bucket_bytes!r}. Expected: a number of bytes, 0 for "
                f"one bucket, or None for `communication_options.bytes_per_pack`, else {DEFAULT_BUCKET_BYTES}."
            )
        self._sharded_state = sharded_state_of(shards_state, shards_weights)
        if self._sharded_state is not None and self._sharded_state.weights and policy.compresses:
            raise ValueError(
                "Gradients of weights in parts are summed where backpropagation computes them, uncompressed. Received: "
                f"compression={compression!r} and `shard_weights`. Expected: one of them. Leave `compression` out, or "
                "create the strategy with `shard_optimizer_state=True` alone."
            )
        _check_nccl_has_gpu(options)
        check_collectives(joins=joins_workers)
        patch_keras(ReplicatedStrategy, HOOKS)
        exclude_from_autograph()
        # Strategies with the same group keys would share collectives.
        self._collective_key_base = _FIRST_GROUP_KEY + _GROUP_KEYS_PER_STRATEGY * next(_strategies_created)
        self._state_bucket_bytes = bucket_bytes
        self._batch_comparison: BatchComparison | None = None
        self._reduction_context = ReductionContext(time_wait)
        self._compression_state = CompressionState(policy if policy.compresses else None)
        self.divided_rows = DividedRows(1)
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        context, state = self._reduction_context, self._compression_state
        self._reduction_within_worker = lambda launcher, index: ReplicaReduction(
            ReplicaHierarchy(launcher, launcher, None, index), context, bucket_bytes
        )

        def reduction(
            everyone: ReplicaLauncher, cross: ReplicaLauncher | None, local: ReplicaLauncher | None, cross_rank: int
        ) -> ReplicaReduction:
            if cross is not None:
                state.num_replicas = max(state.num_replicas, cross.size)  # a group of hosts may be smaller
            hierarchy = ReplicaHierarchy(everyone, cross, local, cross_rank)
            return ReplicaReduction(hierarchy, context, bucket_bytes, policy, state)

        return reduction

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas. A loss that is divided by it counts as scaled for as many replicas."""
        if is_read_by_user():
            self.has_read_number = True
            note_read_number()
        return replica_count(super().num_replicas_in_sync)

    @property
    def shards_weights(self) -> bool:
        """Whether weights are requested to be in parts; one replica has all of them."""
        return self._sharded_state is not None and self._sharded_state.weights

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches into which each replica splits its part of a training step."""
        return 1

    @property
    def communication(self) -> CommunicationStats:
        """What this worker's first replica has passed to collectives so far."""
        return self.gradient_reduction.counters.count()

    @property
    def communication_by_method(self) -> dict[str, CommunicationStats]:
        """The gradients in `communication`, by compression method."""
        return self.gradient_reduction.counters.by_label()

    @property
    def compression_state(self) -> CompressionState:
        """The state that the compressors of this process keep from step to step."""
        return self._compression_state

    def _split_state(self) -> None:
        """Splits the slots of optimizers from now on if that was requested. All workers call this."""
        if self._sharded_state is not None and self.num_replicas_in_sync > 1:
            name = f"tfdist/slots/{self._collective_key_base}"
            self.state_sharding = StateSharding(self, self._state_bucket_bytes, name, self._sharded_state)
            if self._sharded_state.weights:
                self.weight_gathers = WeightGathers(
                    self.state_sharding, self._state_bucket_bytes, self._of_first_worker, has_samples
                )

    def _of_first_worker(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value of worker 0. All workers call this, eagerly."""
        return value

    @property
    def gradient_reduction(self) -> ReplicaReduction:
        """The reduction of this process's first replica, for tfdist's callbacks."""
        return self.extended.replica_operations.reductions[0]

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on each replica, as `tf.distribute.Strategy.run` does.

        If `fn` is the bound `train_step` or `test_step` of a Keras model, the replicas' losses are weighted by their
        numbers of samples, and the returned logs are those over all replicas.

        Raises:
            ValueError: The model's step cannot run under this strategy. The message gives the reason and the remedy.
        """
        check_collectives()
        if self.num_replicas_in_sync > 1:
            reject_exchange_in_compiled_function()
        self.check_batches()
        if not tf.executing_eagerly():
            self.extended.replica_operations.equalize_keys()
        model, name = bound_step(fn)
        predicts = model is None and is_predict_step(fn)
        owner = predicting_model(fn) if predicts else model
        if owner is not None and not tf.executing_eagerly():
            release_with(owner)
        if predicts:
            return super().run(predict_on_replicas(fn, args[0], self), args, kwargs, options)
        if model is None:
            args, kwargs = own_rows(without_filled_rows((args, kwargs)), self)
            self.divided_rows = DividedRows(self.num_replicas_in_sync)
            with self._within_worker(), self.divided_rows.explained():
                return super().run(fn, args, kwargs, options)
        self._models.add(model)
        training = name == "train_step"
        check_model(model, self, training=training)
        is_local = training and self.local_updates is not None
        if is_local:
            self.local_updates.add_model(model)  # type: ignore[union-attr]
        data = args[0] if args else None
        replica_step = step_on_replicas(model, fn, data, self)
        with self._within_worker() if training else nullcontext(), self.divided_rows.explained():
            results = super().run(replica_step, args, kwargs, options)
        if self.row_shares is not None and is_complete(data) and not is_local:
            results, report = results
            if training:
                self.row_shares.add_step(self.experimental_local_results(report)[0])
        if training and self._elastic is not None and not tf.executing_eagerly():
            self._elastic.write_late()
        return self._wrap_results(results)

    def check_batches(self) -> None:
        """Raises an error if workers are known to have drawn different batches."""
        if self._batch_comparison is not None:
            self._batch_comparison.check()

    def run_over_all_replicas(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` on each replica while a function is traced; it reduces over the replicas of all workers."""
        self.extended.replica_operations.equalize_keys()
        return super().run(fn)

    def _within_worker(self) -> AbstractContextManager[None]:
        """Returns the context in which replicas reduce over those of this worker, if updates are local."""
        return nullcontext() if self.local_updates is None else self.extended.replica_operations.within_worker()

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces `value`, or each leaf of a structure, over all replicas; see `tf.distribute.Strategy.reduce`.

        Unlike the base class it accepts structures, and rank-0 values with `axis=0`, which count as one element each.
        """
        if self._builds_locally:
            return tf.nest.map_structure(lambda leaf: self.experimental_local_results(leaf)[0], value)
        self._check_workers()
        reduce_leaf = super().reduce
        return tf.nest.map_structure(lambda leaf: reduce_leaf(reduce_op, leaf, self._axis(leaf, axis)), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the values of all replicas; see `tf.distribute.Strategy.gather`."""
        self._check_workers()
        gather = functools.partial(super().gather, value, axis)
        return gather() if self._elastic is None else self._elastic.run_alone(gather)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Distributes the global batches of a dataset; see `tf.distribute.Strategy.experimental_distribute_dataset`."""
        check_collectives()
        return super().experimental_distribute_dataset(dataset, options)

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """Distributes the datasets of workers; see `tf.distribute.Strategy.distribute_datasets_from_function`."""
        check_collectives()
        return super().distribute_datasets_from_function(dataset_fn, options)

    def written_variables(self, model: Any, *, with_metrics: bool = True) -> WrittenVariables:
        """Returns what a training step of a model may write on this worker, which can be taken back."""

        def find() -> list[Any]:
            shares = [] if self.row_shares is None else [self.row_shares.state]
            variables = variables_of_steps(model, with_metrics=with_metrics)
            return [*variables, *shares, *self.compression_state.variables]

        totals = self.metric_totals if with_metrics else None
        return WrittenVariables(find, lambda: () if totals is None else totals.variables, writes_late=True)

    @property
    def metric_totals(self) -> MetricTotals | None:
        """The sums of the states of metrics over all workers, if these may be lost."""
        return None if self._elastic is None else self._elastic.metric_totals

    @property
    def elastic_coordination(self) -> Any:
        """How the workers of an elastic training agree on saves; `None` in others."""
        return None if self._elastic is None else self._elastic.coordination

    def _check_workers(self) -> None:
        """Raises an error if a reduction or gathering over several workers cannot run any more."""
        if self.num_workers > 1:  # within one process they need no collectives
            check_collectives()

    def _wrap_results(self, results: Any) -> Any:
        """Returns the results of a step, which are equal on all replicas, as Keras expects them."""
        return tf.nest.map_structure(lambda value: self.experimental_local_results(value)[0], results)

    def _max_batches(self, own_batches: int | None) -> int | None:
        """Returns the largest number of batches of all workers, or `None` if a worker does not know its number."""
        check_collectives()
        return own_batches

    def _carry_counts(self, dataset: Any, own_batches: int | None) -> Any:
        """Returns the distributed dataset whose batches carry their numbers of samples, if one worker cannot tell."""
        return dataset

    def _axis(self, value: Any, axis: Any) -> Any:
        ranks = {getattr(getattr(local, "shape", None), "rank", 0) for local in self.experimental_local_results(value)}
        return None if ranks == {0} else axis

    def _shard_rows(self, inputs: Any) -> Any:
        """Distributes `inputs`, which are equal on all workers, in the order in which Keras concatenates results."""
        local = len(self.extended.worker_devices)
        workers = self.num_workers
        first = first_input((inputs,))

        def rows(context: Any) -> Any:
            part = int(context.replica_id_in_sync_group)
            if not keeps_order_of_rows(self):
                worker, replica = divmod(part, local)
                part = replica * workers + worker
            return rows_of_part(inputs, first, part, self.num_replicas_in_sync)

        if self.num_replicas_in_sync == 1 or first is None or is_distributed(inputs):
            return inputs
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        first = first_input((inputs,))
        return self.experimental_distribute_values_from_function(rows)


def _check_nccl_has_gpu(options: Any) -> None:
    nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
    if getattr(options, "implementation", None) == nccl and not tf.config.list_physical_devices("GPU"):
        raise ValueError(
            "NCCL reduces between GPUs only. Received: implementation=NCCL and no GPU. Expected: a visible GPU, or "
            "`CommunicationImplementation.RING` (or AUTO). Leave `communication_options` out to let tfdist choose."
        )
