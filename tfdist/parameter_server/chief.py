"""The chief's part of `fit`, `evaluate` and `predict`: it gives batches to the workers, and sums their metrics."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.scheduled_training import metrics_result, update_counter
from tfdist.losses.step_logs import metric_results
from tfdist.parameter_server.batch_split import PartInfo, PartShares, concatenated, num_rows, split, split_all, split_by
from tfdist.parameter_server.gradient_buffers import GradientBuffers, sample_fractions
from tfdist.parameter_server.gradient_push import GradientEncoder
from tfdist.parameter_server.loss_normalizers import LossNormalizers
from tfdist.parameter_server.modes import Asynchronous, Synchronous, max_push_window, max_running_pushes
from tfdist.parameter_server.push_statistics import StatsCollector
from tfdist.parameter_server.scheduler import Scheduler
from tfdist.parameter_server.step_results import LogPart, ResultPacking, combined_logs, with_results
from tfdist.parameter_server.unsupported_features import reject_unsupported_model
from tfdist.parameter_server.worker_datasets import WorkerIterator
from tfdist.parameter_server.worker_functions import WorkerFunctions
from tfdist.servers.server_monitor import ServerMonitor, explains_lost_servers

_QUEUED_PER_WORKER = 2


@dataclasses.dataclass(frozen=True)
class _TrainTag:
    """Identifies a scheduled training step: when it was scheduled; its round, buffer and worker in synchronous mode."""

    scheduled_at: float  # by `time.monotonic()`
    round: int = 0
    buffer: int = 0
    worker: int | None = None  # for which the part was made


class ChiefTraining:
    """Trains one model under a parameter server strategy."""

    def __init__(self, model: keras.Model, stats: StatsCollector) -> None:
        """Prepares the training of a model. Call this once for each model."""
        self._model, self._stats = model, stats
        self._strategy = strategy = model.distribute_strategy
        self._mode, self._workers = strategy.mode, strategy.num_workers
        self.servers = ServerMonitor("ps", strategy.server_addresses)
        self._scheduler = Scheduler(strategy.coordinator, self.servers.check)
        self._sums = MetricSums(model)
        self._packing = ResultPacking()
        self._encoder = GradientEncoder(strategy.policy, self._new_worker_variable)
        self._functions: WorkerFunctions | None = None
        self._normalizers = LossNormalizers(model, strategy)
        self._pending: list[Any] = []  # batches of the next push
        self._is_prepared = False
        self._number: int | None = None  # of the next update to be scheduled; `None`: read it from the servers
        buffers_per_worker = 2 if isinstance(self._mode, Synchronous) and self._mode.backup_workers else 1
        self._num_buffers = buffers_per_worker * self._workers
        self._free = list(range(self._num_buffers))
        self._round = 0
        self._late: set[int] = set()  # buffers of running parts whose round has ended without them
        self._done: dict[int, tuple[int, Any]] = {}  # of this round: samples and result, by buffer
        self._ends: list[tuple[float, int]] = []  # of this round: (time, worker) of each end, in order
        self._shares: PartShares = strategy.part_shares
        self._seconds = 0.0  # of this round, until its last part ended
        self._measured: dict[int, tuple[float, int]] = {}  # of this round: seconds and samples, by worker

    # What Keras calls.

    @explains_lost_servers
    def train(self, iterator: Any) -> dict[str, Any]:
        """Schedules the batches of `steps_per_execution` steps; returns the logs of all steps that have ended."""
        functions = self._prepared()
        for number in range(self._model.steps_per_execution):
            try:
                batch = iterator if isinstance(iterator, WorkerIterator) else next(iterator)
            except StopIteration:
                if number == 0:
                    raise
                break
            self._pending.append(batch)
            if len(self._pending) == self._strategy.gradient_accumulation_steps:
                self._train_on_pending(functions)
        if not isinstance(iterator, tf.data.Iterator | WorkerIterator):  # `train_on_batch`
            self._finish_training()
        return self._results()

    @explains_lost_servers
    def test(self, iterator: Any) -> dict[str, Any]:
        """Does what `train` does, for `evaluate`."""
        functions = self._functions_of_model()
        for number in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if number == 0:
                    raise
                break
            self._wait_for_capacity()
            self._scheduler.schedule(functions.test, (batch,), self._sums.next_number())
        if not isinstance(iterator, tf.data.Iterator | WorkerIterator):
            self._finish_scheduled()
        return self._results()

    @explains_lost_servers
    def predict(self, batches: Any) -> Any:
        """Returns the outputs for batches, whose rows are split over all workers."""
        functions = self._functions_of_model()
        self._finish_scheduled()
        outputs: dict[int, Any] = {}
        pieces = [piece for batch in batches for piece in split(batch, self._workers)]
        for number, piece in enumerate(pieces):
            self._scheduler.schedule(functions.predict, (piece,), number)
        self._scheduler.wait(lambda: len(outputs) == len(pieces), outputs.__setitem__)
        parts = [outputs[number] for number in range(len(pieces))]
        return tf.nest.map_structure(concatenated, *parts)

    @explains_lost_servers
    def begin(self) -> None:
        """Resets the metrics."""
        self._finish_scheduled()
        self._sums.reset()
        self._number = None

    @explains_lost_servers
    def wait(self) -> None:
        """Waits until all batches so far are trained on, and stores the metrics."""
        self._finish_training()
        self._sums.store()
        self._number = None  # so that the numbers after a save equal those after a restart

    @explains_lost_servers
    def logs_of_all_steps(self) -> dict[str, Any]:
        """Waits as `wait` does; returns the logs of the last step, in which metrics have their results of all steps."""
        self._finish_training()
        return self._sums.results()

    @explains_lost_servers
    def abandon(self) -> None:
        """Discards the pending batches of a `fit` that an exception has ended, before a checkpoint is restored."""
        self._pending.clear()
        self._finish_scheduled()
        self._number = None

    def forget(self, name: str) -> None:
        """Discards the functions after the model was compiled again."""
        if name == "train":
            self._finish_scheduled()
            self._functions, self._sums = None, MetricSums(self._model)
            self._normalizers = LossNormalizers(self._model, self._strategy)

    # Preparation.

    def _prepared(self) -> WorkerFunctions:
        functions = self._functions_of_model()
        if not self._is_prepared:
            model = self._model
            reject_unsupported_model(model)
            optimizer = model.optimizer
            with self._strategy.scope():
                if not optimizer.built:
                    optimizer.build(model.trainable_variables)
                inner = getattr(optimizer, "inner_optimizer", optimizer)
                paths = OptimizerUpdate(inner, model.trainable_variables).paths
                self._encoder.prepare(
                    paths,
                    [variable.shape for variable in model.trainable_variables],
                    may_skip_rounds=isinstance(self._mode, Synchronous) and inner is not optimizer,
                )
            self._is_prepared = True
        return functions

    def _functions_of_model(self) -> WorkerFunctions:
        if self._functions is None:
            self._functions, self._is_prepared = self._new_functions(), False
        return self._functions

    def _new_functions(self) -> WorkerFunctions:
        buffers = GradientBuffers(self._num_buffers) if isinstance(self._mode, Synchronous) else None
        return WorkerFunctions(self._model, self._strategy, self._encoder, buffers, self._packing)

    def _new_worker_variable(self, value: tf.Tensor) -> tf.Variable:
        with self._strategy.scope():
            return tf.Variable(value, trainable=False, per_worker_variable=True)

    # Scheduling.

    def _train_on_pending(self, functions: WorkerFunctions) -> None:
        batches, self._pending = self._pending, []
        if isinstance(self._mode, Asynchronous):
            self._wait_for_capacity()
            total, normalizers = self._totals(functions, batches, [batches])
            part = PartInfo(self._next_number(), 0, total, normalizers)
            self._schedule(functions, batches, part, _TrainTag(time.monotonic()))
        elif isinstance(self._mode, Synchronous):
            self._run_round(functions, batches, self._mode)

    def _next_number(self) -> int:
        """Returns the number of updates before this one; a resumed training counts those before the restart."""
        if self._number is None:
            self._number = int(update_counter(self._model.optimizer).numpy())
        self._number += 1
        return self._number - 1

    def _schedule(
        self, functions: WorkerFunctions, batches: list[Any], part: PartInfo, tag: _TrainTag, phase: int = 0
    ) -> None:
        if isinstance(batches[0], WorkerIterator):
            args: tuple[Any, ...] = (batches[0].dataset.iterators, len(batches), part.pack())
            self._scheduler.schedule(functions.train_on_iterator, args, tag)
        else:
            self._scheduler.schedule(functions.train_on_batches, (tuple(batches), part.pack(), phase), tag, tag.worker)

    def _totals(
        self, functions: WorkerFunctions, batches: list[Any], parts: Sequence[list[Any]], phase: int = 0
    ) -> tuple[int, list[float]]:
        """Returns `total` and `normalizers` of the `PartInfo` of a push or a round."""
        if isinstance(batches[0], WorkerIterator):
            return len(parts), []
        if len(parts) == len(batches) == 1:
            return num_rows(batches[0]), []
        number = functions.num_normalizers(parts[0], phase)
        return sum(map(num_rows, batches)), self._normalizers.of(batches, number) if number else []

    def _run_round(self, functions: WorkerFunctions, batches: list[Any], mode: Synchronous) -> None:
        # A worker that has not finished an earlier round takes no part in this one: its part would wait in the queue.
        self._scheduler.wait(lambda: len(self._late) <= mode.backup_workers, self._collect)
        available = self._workers - len(self._late)
        parts = [batches] * available
        workers: list[int | None] = [None] * available
        if self._shares.follows_speeds and not isinstance(batches[0], WorkerIterator):
            sized = split_by(batches, self._shares.sizes)
            workers, parts = [w for w, part in enumerate(sized) if part], [part for part in sized if part]
        elif not isinstance(batches[0], WorkerIterator):
            parts = split_all(batches, available)
        self._seconds, self._measured = 0.0, {}
        buffers, self._free = self._free[: len(parts)], self._free[len(parts) :]
        first = self._next_number() * self._workers
        waiting = {
            buffer: (number, batches_of_part, worker)
            for number, (buffer, batches_of_part, worker) in enumerate(
                zip(buffers, parts, workers, strict=False), first
            )
        }
        for phase in itertools.count():
            finished = self._run_phase(functions, batches, waiting, phase, mode)
            weights = sample_fractions([samples for samples, _ in finished.values()])
            functions.update(tf.constant(list(finished), tf.int32), tf.constant(weights, tf.float64), phase)
            # A part that is late is left out of the later phases, too.
            waiting = {buffer: waiting[buffer] for buffer in finished}
            results = [result for _, result in finished.values()]
            if results[0]["is_last"]:
                break
        if self._shares.follows_speeds:
            self._shares.add_round(self._seconds, self._measured)
        # By buffer: rounding must not depend on who was first.
        self._sums.add_parts([part["metrics"] for part in results], [part["logs"] for part in results], weights)
        self._stats.updates += 1
        self._free = sorted([*self._free, *finished])  # sorted, so that sums have the same order after a restart

    def _run_phase(
        self,
        functions: WorkerFunctions,
        batches: list[Any],
        waiting: dict[int, tuple[int, list[Any], int | None]],
        phase: int,
        mode: Synchronous,
    ) -> dict[int, tuple[int, Any]]:
        """Has the workers compute a phase of a round; returns samples and result of each part, by buffer.

        `waiting` has, by buffer, the part's number, its batches, and the worker for which it was made.
        """
        total, normalizers = self._totals(functions, batches, [part for _, part, _ in waiting.values()], phase)
        self._round += 1
        self._done, self._ends, began = {}, [], time.monotonic()
        for buffer, (number, batches_of_part, worker) in waiting.items():
            part = PartInfo(number, buffer, total, normalizers)
            self._schedule(functions, batches_of_part, part, _TrainTag(began, self._round, buffer, worker), phase)
        needed = max(1, len(waiting) - max(0, mode.backup_workers - len(self._late)))
        self._scheduler.wait(lambda: len(self._done) >= needed, self._collect)
        self._seconds += self._ends[-1][0] - began
        if len(self._ends) > 1:
            (before_last, _), (last, late) = self._ends[-2:]
            self._stats.add_held_up(late, last - before_last)
        finished = dict(sorted(self._done.items()))
        self._late |= set(waiting) - set(finished)
        self._round += 1
        return finished

    def _wait_for_capacity(self) -> None:
        limit = _QUEUED_PER_WORKER * self._workers
        window: int | None = None
        if isinstance(self._mode, Asynchronous):
            limit = max_running_pushes(self._mode, self._workers) or limit
            window = max_push_window(self._mode, self._workers)
        scheduler = self._scheduler
        scheduler.wait(lambda: len(scheduler) < limit and (window is None or scheduler.window < window), self._collect)

    # Results.

    def _collect(self, tag: Any, packed: list[Any]) -> None:
        result = self._packing.unpack(packed)
        if not isinstance(tag, _TrainTag):  # of `evaluate`
            self._sums.add_in_order(tag, result["metrics"], result["logs"])
            return
        report = {name: int(value) for name, value in result["report"].items()}
        counts = isinstance(self._mode, Asynchronous) or tag.round == self._round
        self._stats.add(report, counts=counts, scheduled_at=tag.scheduled_at, is_last=bool(result["is_last"]))
        if isinstance(self._mode, Asynchronous):
            self._stats.updates += 1
            self._sums.add(result["metrics"], result["logs"])
        elif counts:
            self._done[tag.buffer] = report["samples"], result
            self._ends.append((time.monotonic(), report["worker"]))
            if tag.worker == report["worker"]:
                before, _ = self._measured.get(tag.worker, (0.0, 0))
                self._measured[tag.worker] = before + self._ends[-1][0] - tag.scheduled_at, report["samples"]
        else:
            self._late.discard(tag.buffer)
            self._free.append(tag.buffer)

    def _finish_training(self) -> None:
        if self._pending and self._functions is not None:
            self._train_on_pending(self._functions)
        self._finish_scheduled()

    def _finish_scheduled(self) -> None:
        self._scheduler.wait(lambda: not len(self._scheduler), self._collect)
        self._free, self._late = list(range(self._num_buffers)), set()  # also after an interrupted round

    def _results(self) -> dict[str, Any]:
        for tag, result in self._scheduler.finished():
            self._collect(tag, result)
        self._scheduler.wait(lambda: self._sums.has_results or not len(self._scheduler), self._collect)
        # Keras asks for the metrics' names before the first push of an epoch.
        return self._sums.results() or metrics_result(self._model)


class MetricSums:
    """The metrics' sums over all steps since the last reset; each step counts once.

    Correct for metrics whose variables are sums over samples, as those of all Keras metrics are.

    Attributes:
        has_results: Whether a step was added since the last reset. (A step may return no logs.)
    """

    def __init__(self, model: keras.Model) -> None:
        """Starts with the present values of the model's metrics."""
        self._model = model
        self._logs: LogPart = {"values": {}, "is_result": np.zeros([0, 0], bool)}
        self.reset()
        # Eagerly, computing a result takes longer than the chief may spend on a batch.
        self._result_of = tf.function(self._results_of, autograph=False)

    def reset(self) -> None:
        self._sums: list[np.ndarray] | None = None
        self._known: dict[str, Any] = {}
        self._numbers, self._next, self._early = 0, 0, dict[int, tuple[Any, Any]]()
        self._is_new = self.has_results = False

    def add(self, metrics: Sequence[tf.Tensor], logs: LogPart) -> None:
        """Adds a step; see `add_parts`."""
        self.add_parts([metrics], [logs], [1.0])

    def add_parts(
        self, metrics: Sequence[Sequence[tf.Tensor]], logs: Sequence[LogPart], weights: Sequence[float]
    ) -> None:
        """Adds a step that was computed in parts.

        Metrics are what a part has added to their variables, weights the fractions of the samples in each part.
        """
        if self._sums is None:
            self._sums = [variable.numpy() for variable in self._model.metrics_variables]
        for of_part in metrics:
            self._sums = [total + np.asarray(part) for total, part in zip(self._sums, of_part, strict=True)]
        self._logs = combined_logs(logs, weights)
        self._is_new = self.has_results = True

    def next_number(self) -> int:
        """Returns the number by which a step is later given to `add_in_order`."""
        self._numbers += 1
        return self._numbers - 1

    def add_in_order(self, number: int, metrics: Sequence[tf.Tensor], logs: LogPart) -> None:
        """Adds a step in the order of the numbers, so that rounding does not depend on which step ended first."""
        self._early[number] = metrics, logs
        while self._next in self._early:
            self.add(*self._early.pop(self._next))
            self._next += 1

    def results(self) -> dict[str, Any]:
        """Returns the last step's logs, in which the metrics have their results over all steps."""
        if self._is_new and self._sums is not None:
            self._known = with_results(self._logs, self._result_of([tf.constant(total) for total in self._sums]))
            self._is_new = False
        return dict(self._known)

    def _results_of(self, sums: list[tf.Tensor]) -> list[Any]:
        with keras.StatelessScope(list(zip(self._model.metrics_variables, sums, strict=True))):
            return [result for _, result in metric_results(self._model)]

    def store(self) -> None:
        """Writes the sums to the variables of the metrics."""
        if self._sums is not None:
            for variable, total in zip(self._model.metrics_variables, self._sums, strict=True):
                variable.assign(total)
            self._sums = None
