"""Workers that run the same `ElasticLoop` as threads of one process, and what one process computes in it."""

import contextlib
import itertools
import time
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from thread_workers import ThreadWorker, ThreadWorkers

from tfdist.collectives import CompressionState
from tfdist.elastic.loop_member import LoopMember
from tfdist.elastic.loop_state import LoopState
from tfdist.elastic.step_transactions import StepTransactions
from tfdist.exchange.worker_exchange import STEPS
from tfdist.strategies import ElasticLoop
from tfdist.training.metric_totals import MetricTotals
from tfdist.training.strategy_protocol import TrainingStrategy

ROWS, BATCH, CHECKS, CHECKED_BATCH = 30, 6, 3, 2
_MODULUS = 1_000_003
_STEP_SECONDS = 0.002


def data() -> Any:
    """Numbers whose order is another one in each epoch; the last batch is smaller."""
    return tf.data.Dataset.range(1, ROWS).shuffle(ROWS, seed=7).batch(BATCH)


def checks() -> Any:
    """Data that is drawn after some batches of an epoch, and at its end, each time in another order."""
    return tf.data.Dataset.range(CHECKS).shuffle(CHECKS, seed=9).batch(1)


def after(weight: int, batch: Any) -> int:
    """What a weight is after a step; it depends on the order of the batches."""
    return int((3 * weight + int(np.sum(batch))) % _MODULUS)


class OneProcess:
    """What one process computes.

    Attributes:
        weights: After each step, from 0.
        sums: The sums of each epoch that has ended: of its training data, and of its validation data.
    """

    def __init__(self, data: Any) -> None:
        self.weights, self.sums = [0], []
        self._data, self._checks = data, checks()

    def train(self, epochs: int) -> None:
        """Makes further epochs."""
        while len(self.sums) < epochs:
            for number, batch in enumerate(self._data, 1):
                self.weights.append(after(self.weights[-1], batch))
                if number == CHECKED_BATCH:
                    self._check()
            self._check()
            self.sums.append([ROWS * (ROWS - 1) // 2, 2 * CHECKS])

    def _check(self) -> None:
        for batch in self._checks.as_numpy_iterator():
            self.weights.append(after(self.weights[-1], batch))


class _HasEnded(Exception):
    pass


class _Log:
    def __init__(self) -> None:
        self.sums: list[Any] = []

    def get_state(self) -> Any:
        return self.sums

    def set_state(self, state: Any) -> None:
        self.sums = list(state)


class _Strategy(TrainingStrategy):
    """What a loop uses of an elastic strategy, on one of its workers."""

    extended = SimpleNamespace(worker_devices=("CPU:0",))
    compression_state = CompressionState()
    rank, replicas_of_workers = 0, ()

    def __init__(self, worker: Any, workers: int) -> None:
        self._elastic, self.rank, self.num_replicas_in_sync = worker, worker.rank, workers
        self.replicas_of_workers = (1,) * workers

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        return dataset

    def _carry_counts(self, dataset: Any, batches: Any) -> Any:
        return dataset

    def scope(self) -> Any:
        return contextlib.nullcontext()


class LoopWorker(ThreadWorker):
    """A worker of an `ElasticLoop`.

    Attributes:
        data: Returns its training data.
        log: The sums of metrics of each epoch that has ended, which a worker that joins gets.
    """

    data = staticmethod(data)
    common_state = SimpleNamespace(numpy=lambda: np.zeros(1), assign=lambda value: None)
    rank: int

    def loop_member(self, objects: Any) -> LoopMember:
        """As that of an elastic strategy."""
        transactions = self.transactions
        return LoopMember(
            transactions,
            LoopState(objects, self._strategy, self._totals, transactions.sum_over_workers),
            others=tuple,
            overwritten=lambda: self._totals.variables,
            take_no_rows=self._take_no_rows,
            share_metrics=self._share_metrics,
        )

    def follow(self, workers: Any) -> None:
        """Other workers train."""
        self._share_metrics()

    def _train_with(self, transactions: StepTransactions) -> None:
        with contextlib.suppress(_HasEnded):
            self._run_loop(transactions)

    def _run_loop(self, transactions: StepTransactions) -> None:
        self._totals, self._strategy = (
            MetricTotals(),
            _Strategy(self, len(self.addresses)),
        )
        transactions.tell(self)
        if transactions.is_alone:
            self._ranks = [self.rank]
        weight, self.log = tf.Variable(0, dtype=tf.int64), _Log()
        seen, checked = keras.metrics.Sum(dtype="float64"), keras.metrics.Sum(dtype="float64")
        loop = ElasticLoop(self._strategy, {"weight": weight, "metrics": [seen, checked], "log": self.log})

        @loop.step
        def train(batch: Any) -> None:
            own = self._own(batch.numpy())
            total = self._sum_of_workers(np.array([np.sum(own)]))
            self.after_exchange()
            weight.assign((3 * weight + int(total[0])) % _MODULUS)
            seen.update_state(np.sum(own))

        @loop.step
        def check(batch: Any) -> None:
            weight.assign(after(int(weight), batch))
            checked.update_state(len(self._own(batch.numpy())))

        def run(step: Any, batch: Any) -> None:
            step(batch)
            assert loop.steps == self.membership.committed_steps
            self.totals[loop.steps] = int(weight)
            if loop.steps >= self.last_step or self.is_killed:
                raise _HasEnded
            time.sleep(_STEP_SECONDS)

        training_data, validation_data = self.data(), checks()
        for _ in loop.epochs(10**9):
            seen.reset_state()
            checked.reset_state()
            for batch in loop.batches(training_data):
                run(train, batch[0] if isinstance(batch, tuple) else batch)
                if loop.batch == CHECKED_BATCH:
                    for inner in loop.batches(validation_data):
                        run(check, inner)
            for batch in loop.batches(validation_data):
                run(check, batch)
            sums = self._totals.of([seen.total, checked.total])
            self.log.sums = [*self.log.sums, [int(value) for value in sums]]

    def _own(self, rows: np.ndarray) -> np.ndarray:
        if self.rank not in self._ranks:
            return rows[:0]
        return rows[self._ranks.index(self.rank) :: len(self._ranks)]

    def _sum_of_workers(self, values: np.ndarray) -> np.ndarray:
        return self.exchange.channel(STEPS).all_reduce(values)

    def _sum_over_workers(self, value: Any) -> Any:
        return tf.constant(self._sum_of_workers(value.numpy()))

    def _take_no_rows(self) -> None:
        self._ranks = []
        self._totals.divide(is_first=False)

    def _share_metrics(self) -> None:
        self._totals.divide(is_first=self.group.is_first)


class LoopWorkers(ThreadWorkers):
    """The workers of a loop."""

    worker = LoopWorker
    data_of_one = staticmethod(data)

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, self.worker, **options)

    def check(self) -> None:
        """Compares the weight of each worker after each of its steps, and the sums of its epochs, with one process."""
        one = OneProcess(self.data_of_one())
        one.train(max(len(worker.log.sums) for worker in self.all) + 1)
        for worker in self.all:
            steps = sorted(worker.totals)
            assert steps == list(range(steps[0], steps[-1] + 1)) if steps else True, "a step is missing"
            wrong = {step: weight for step, weight in worker.totals.items() if weight != one.weights[step]}
            assert not wrong, (worker.rank, dict(itertools.islice(sorted(wrong.items()), 5)))
            assert worker.log.sums == one.sums[: len(worker.log.sums)], worker.rank
