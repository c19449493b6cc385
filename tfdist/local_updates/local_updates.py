"""The local updates of a strategy: its optimizers, what training asks of them, and when all weights become equal."""

import concurrent.futures
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.all_reduce import ReplicaReduction
from tfdist.collectives.key_values import key_values
from tfdist.compression.gradient_tensors import divided
from tfdist.keras_internals.model_introspection import averaged_states
from tfdist.keras_internals.model_state import components, optimizers_of
from tfdist.local_updates.background_exchange import BackgroundExchange
from tfdist.local_updates.local_modes import DiLoCo, LocalMode
from tfdist.local_updates.synced_optimizer import Fragment, SyncedOptimizer, assign_means
from tfdist.tensorflow_internals.function_graphs import release_with

_KEPT_FUNCTIONS = 4


class LocalUpdates:
    """The local updates of all optimizers of a strategy.

    Attributes:
        mode: How weights are exchanged.
        ends_are_known: Whether the epoch that runs has a number of steps that all workers know, a bool variable.
    """

    def __init__(self, strategy: Any, mode: LocalMode, samples_of_step: Callable[[], Any]) -> None:
        """Prepares a complete strategy.

        `samples_of_step` returns the samples of all replicas of this worker in the Keras step that is running; `None`
        in a custom loop.
        """
        self.mode = mode
        self._strategy_reference = weakref.ref(strategy)
        self._samples_of_step = samples_of_step
        self._first_replica = sum(strategy.replicas_of_workers[: strategy.rank])
        self._of_optimizers: list[tuple[weakref.ref[Any], SyncedOptimizer]] = []
        self._models: list[weakref.ref[Any]] = []  # in the order of their first steps, which is that of all workers
        self._flushes: dict[Any, Any] = {}
        self._begun: list[bool] = []
        self._created = 0  # equal on all workers, unlike the number of optimizers that exist
        with tf.device("CPU:0"):
            self.ends_are_known = tf.Variable(False, trainable=False)

    @property
    def _strategy(self) -> Any:
        return self._strategy_reference()

    def begin_epoch(self, *, knows_end: bool) -> None:
        """Sets `ends_are_known` for an epoch, which may be within another one (`evaluate` in a callback)."""
        self._begun.append(bool(self.ends_are_known.numpy()))
        self.ends_are_known.assign(knows_end)

    def end_epoch(self) -> None:
        """Sets `ends_are_known` as it was before the epoch."""
        self.ends_are_known.assign(self._begun.pop())

    def add_model(self, model: Any) -> None:
        """Notes a model whose batch statistics are averaged."""
        if not any(known() is model for known in self._models):
            self._models.append(weakref.ref(model))

    def of(self, update: Any) -> "LocalUpdate":
        """Returns the local updates of the optimizer of an `OptimizerUpdate`."""
        return LocalUpdate(self._synced(update.optimizer), self._samples_of_step, self._factor)

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Creates the variables for a model's optimizers that are built, before their first update.

        A training that resumes at the end of an epoch makes no step before all weights become equal.
        """
        self.add_model(model)
        for optimizer in optimizers:
            self._synced(optimizer)

    def synchronize(self, given: Sequence[Any] = ()) -> None:
        """Makes weights, their moving averages and batch statistics equal on all workers, if workers have trained.

        Call this eagerly and on all workers. Statistics of the `given` models are averaged, beside those of models that
        were trained by their `train_step`.
        """
        # Objects that were deleted may still exist on some workers, so only trained ones are considered.
        counts = {synced: count for synced in self._known() if (count := synced.number_of_updates())}
        if not counts:
            return
        are_equal = [
            not self.mode.kept_share and synced_optimizer.schedule.leaves_equal_weights(counts[synced_optimizer])
            for synced_optimizer in counts
        ]
        under_way = [synced_optimizer.schedule.under_way(count) for synced_optimizer, count in counts.items()]
        models = self._models_of(list(counts))
        models += [model for model in given if not any(model is known for known in models)]
        key = str(under_way), tuple(are_equal), tuple(map(weakref.ref, counts)), tuple(map(weakref.ref, models))
        if key not in self._flushes:
            for oldest in list(self._flushes)[: 1 - _KEPT_FUNCTIONS]:  # they keep weights alive
                del self._flushes[oldest]
            flush = functools.partial(self._run_flush, key[2], are_equal, under_way, key[3])
            self._flushes[key] = tf.function(flush, autograph=False)
        strategy = self._strategy

        def written() -> list[Any]:
            variables = [variable for synced in counts for variable in synced.flushed_variables]
            variables += [variable for model in models for variable in averaged_states(model)]
            return [
                *(component for variable in variables for component in components(strategy, variable)),
                *strategy.compression_state.variables,
            ]

        strategy.run_writing(self._flushes[key], written)

    def saved_variables(self, optimizers: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the variables of optimizers to save, by names: those equal on all workers, and those that are not."""
        shared: dict[str, Any] = {}
        own_variables: dict[str, Any] = {}
        known = {id(optimizer()): synced for optimizer, synced in self._of_optimizers}
        for number, optimizer in enumerate(optimizers):
            if (synced := known.get(id(optimizer))) is not None:
                shared |= {f"{number}/{name}": variable for name, variable in synced.shared_variables.items()}
                own_variables |= {f"{number}/{name}": variable for name, variable in synced.own_variables.items()}
        return shared, own_variables

    def hold(self) -> None:
        """Completes exchanges that are under way, without using their sums; call this before variables are saved."""
        for synced in self._known():
            synced.hold()

    def resume(self, *, same_workers: bool) -> None:
        """Continues with restored variables; see `SyncedOptimizer.resume`."""
        for synced in self._known():
            synced.resume(same_workers=same_workers)

    def mean_of_workers(self, values: Sequence[float]) -> list[float]:
        """Returns the means of the `values` of all workers that are not lost. Call this eagerly and on all of them."""
        if not values:
            return []
        workers, *sums = self._strategy.values_of_workers(np.array([1, *values], np.float32)).sum(axis=0)
        return [float(total / workers) for total in sums]

    def _run_flush(
        self,
        known: Sequence["weakref.ref[SyncedOptimizer]"],
        are_equal: Sequence[bool],
        under_way: Sequence[Sequence[int]],
        models: Sequence["weakref.ref[Any]"],
    ) -> None:
        all_synced = [synced for reference in known if (synced := reference()) is not None]  # all, in a call
        all_models = [model for reference in models if (model := reference()) is not None]

        def flush_replica() -> None:
            for synced, is_equal, of_synced in zip(all_synced, are_equal, under_way, strict=True):
                synced.finish() if is_equal else synced.flush(of_synced)
            statistics = [variable for model in all_models for variable in averaged_states(model)]
            assign_means(self._strategy, statistics)

        for model in all_models:
            release_with(model)
        self._strategy.run_over_all_replicas(flush_replica)

    def _models_of(self, trained: Sequence[SyncedOptimizer]) -> list[Any]:
        """Returns the models that one of these optimizers belongs to."""
        optimizers = [optimizer() for optimizer, synced in self._of_optimizers if synced in trained]
        models = [model for model in (reference() for reference in self._models) if model is not None]
        return [
            model
            for model in models
            if any(local_optimizer is candidate for local_optimizer in optimizers for candidate in optimizers_of(model))
        ]

    def _known(self) -> list[SyncedOptimizer]:
        self._of_optimizers = [(optimizer, synced) for optimizer, synced in self._of_optimizers if optimizer()]
        return [synced for _, synced in self._of_optimizers]

    def _synced(self, optimizer: Any) -> SyncedOptimizer:
        for known, synced in self._of_optimizers:
            if known() is optimizer:
                return synced
        strategy = self._strategy

        def create() -> SyncedOptimizer:
            with strategy.scope():
                return SyncedOptimizer(optimizer, self.mode, strategy, self._reduction, self._in_background)

        # A new thread is in no scope and no replica context, and traces nothing.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            synced = thread.submit(create).result()
        self._created += 1
        self._of_optimizers.append((weakref.ref(optimizer), synced))
        return synced

    def _in_background(self, fragments: Sequence[Fragment]) -> BackgroundExchange | None:
        strategy, mode, number = self._strategy, self.mode, self._created
        if not isinstance(mode, DiLoCo) or not mode.overlap_steps or strategy.num_workers == 1:
            return None
        launcher = strategy.extended.replica_operations.background_launcher(number)
        reduction = strategy.gradient_reduction.in_background(launcher)
        specs = [([anchor.shape for anchor in fragment.anchors], fragment.paths) for fragment in fragments]
        name = f"tfdist/exchanges/{strategy._collective_key_base}/{number}"
        progress = ExchangeProgress(name, strategy.rank, strategy.num_workers)
        return BackgroundExchange(specs, reduction, launcher.device, mode.timeout_seconds, progress.late_workers)

    def _reduction(self) -> ReplicaReduction:
        number = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return self._strategy.extended.replica_operations.reductions[int(number) - self._first_replica]

    @functools.cached_property
    def _factor(self) -> float:
        strategy = self._strategy
        return float(int(strategy.num_replicas_in_sync) / strategy.replicas_of_workers[strategy.rank])


class LocalUpdate:
    """The updates of one optimizer, as training asks for them on a replica."""

    def __init__(self, synced: SyncedOptimizer, samples_of_step: Callable[[], Any], factor: float) -> None:
        """Updates `synced`; `factor` is the number of all replicas divided by those of this worker."""
        self._synced, self._samples_of_step, self._factor = synced, samples_of_step, factor

    def take(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients of a step of this replica as parts of the gradient of its worker.

        Losses of custom loops are divided by the samples, or the number of replicas, of all workers.
        """
        if tf.executing_eagerly():
            raise ValueError(
                "Local updates run in functions. Received: an update in eager execution (`run_eagerly=True`, or a "
                "custom loop without `tf.function`). Expected: a compiled step. Leave `run_eagerly` out, or call "
                "`strategy.run` in a `tf.function`."
            )
        samples = self._samples_of_step()
        self._synced.count(1.0 if samples is None else samples)
        if samples is not None or self._factor == 1:
            return list(gradients)
        return [divided(gradient, 1 / self._factor) for gradient in gradients]

    def update(self, apply: Callable[[], None]) -> None:
        """Runs `apply`, an update of this worker's weights, and the exchanges that follow it."""
        self._synced.update(apply, is_certain=not tf.is_tensor(self._samples_of_step()))


_LOOK_SECONDS = 2.0


class ExchangeProgress:
    """The exchanges that workers have started, in the key-value store of the cluster."""

    def __init__(self, name: str, rank: int, num_workers: int) -> None:
        """Prepares a worker. `name` is unique in the cluster, and the same on all workers."""
        self._name, self._rank, self._num_workers = name, rank, num_workers
        self._noted = -1

    def late_workers(self, exchange: int) -> str:
        """Notes that this worker has started an exchange; called again for it, names the workers that have not."""
        if exchange > self._noted:
            key_values.publish(self._key(exchange, self._rank), "")
            if self._noted >= 1:  # all have started the exchange before the last one, which this worker has ended
                key_values.withdraw(self._key(self._noted - 1, self._rank))
            self._noted = exchange
            return ""
        other_ranks = [rank for rank in range(self._num_workers) if rank != self._rank]
        late = [rank for rank in other_ranks if not key_values.is_published(self._key(exchange, rank), _LOOK_SECONDS)]
        return ", ".join(f"worker {rank}" for rank in late)

    def _key(self, exchange: int, rank: int) -> str:
        return f"{self._name}/{exchange}/{rank}"
