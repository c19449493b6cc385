"""Workers of an elastic training as threads of one process: real sockets, and steps whose results are known."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from worker_groups import free_addresses

from tfdist.elastic.step_transactions import Changes, StepTransactions
from tfdist.exchange.worker_exchange import STEPS, Exchange
from tfdist.membership.elastic_group import ElasticGroup
from tfdist.membership.worker_membership import Membership

LIMIT_SECONDS = 60.0
ROWS = 60  # of a step, which all numbers of workers divide
_STEP_SECONDS = 0.002


def total_after(step: int) -> int:
    """Returns what the state of each worker is after a step: step n adds `ROWS * n`."""
    return ROWS * step * (step + 1) // 2


def wait_until(is_so: Callable[[], Any], what: str, limit_seconds: float = LIMIT_SECONDS) -> None:
    """Waits for an event."""
    deadline = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not in {limit_seconds:g} s: {what}"
        time.sleep(0.002)


class _Total:
    """What the steps of a worker write: when they count, or before that."""

    def __init__(self, *, writes_late: bool) -> None:
        self.values, self.writes_late = np.zeros(4, np.int64), writes_late

    def read(self) -> Any:
        return self.values

    def take_back(self, values: Any) -> None:
        assert not self.writes_late or self.values is values
        self.values = values


class _SentValues:
    """An array that calls a function before its values are sent."""

    def __init__(self, values: Any, before: Callable[[], None]) -> None:
        self._values, self._before = values, before

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        del dtype, copy
        self._before()
        return self._values


class ThreadWorker:
    """A worker that trains until it is killed, or has made `last_step`.

    Those of odd ranks write when a step counts, as a graph does, the others before that, as a step in Python.

    Attributes:
        totals: Its state after each step that it has committed.
        error: What ended its training.
        after_exchange: Called within each step, when its sums are there.
        after_step: Called after each step that counts.
        before_state: Called on the thread that sends its state, before it does.
        refusal: Why it cannot send its state, if it cannot.
    """

    def __init__(
        self,
        rank: int,
        addresses: list[str],
        before_exchange: Callable[["ThreadWorker"], None] = lambda worker: None,
        meanwhile: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        self.rank, self.addresses, self._before_exchange = rank, addresses, before_exchange
        self._meanwhile = meanwhile  # while it waits for a state
        self.options = {"token": "t", "cluster": "c", "timeout_seconds": 30.0, "silence_seconds": 20.0, **options}
        self.totals: dict[int, int] = {}
        self.last_step = 10**9
        self.is_killed = self.has_started = self.is_stuck = False
        self.error: BaseException | None = None
        self.group: ElasticGroup
        self.exchange: Exchange
        self.exchanges_of_step = 1
        self.after_exchange: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        self.before_state: Callable[[], None] = lambda: None
        self.refusal = ""
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    @property
    def membership(self) -> Membership:
        return self.group.membership

    @property
    def trains(self) -> bool:
        return self.has_started and self.error is None and not self.is_killed and self.membership.is_member

    def kill(self) -> None:
        """Closes all connections, as the kernel does."""
        self.is_killed = True
        self.group.close()
        self.exchange.close(has_ended=False)

    def _main(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error
        if hasattr(self, "exchange") and not self.is_stuck:
            self.exchange.close(has_ended=self.error is None)
        if hasattr(self, "group") and not self.is_stuck:
            self.group.close()

    def _train(self) -> None:
        group = self.group = ElasticGroup(self.rank, self.addresses, offer=dict, encryption=None, **self.options)
        view = None if self.membership.has_joined_late else self.membership.view
        self._before_exchange(self)
        self.exchange = group.exchange(view)
        self._ranks = [] if view is None else self.membership.ranks(view)
        self._state = _Total(writes_late=bool(self.rank % 2))
        self.transactions = transactions = StepTransactions(
            group, lambda: self.exchange.failure, self._connect, self._sum_over_workers
        )
        self.has_started = True
        self._train_with(transactions)

    def _train_with(self, transactions: StepTransactions) -> None:
        group = self.group
        if transactions.is_alone:
            receiver = group.ask_for_state(0, self._meanwhile)
            assert receiver is not None and receiver.state is not None
            self._state.values = np.frombuffer(receiver.state[1][0], np.int64)
            self._ranks = []
            transactions.replay(receiver, Changes())
            self._has_joined()
        while self.membership.committed_steps < self.last_step and not self.is_killed:
            self._run_step()
            self.totals[self.membership.committed_steps] = int(self._state.values[0])
            assert (self._state.values == self._state.values[0]).all()
            self.after_step()
            if group.donor.is_asked and self.membership.is_member:
                self._give_state()
            time.sleep(_STEP_SECONDS)

    def total_after(self, step: int) -> int:
        """Returns what its state must be after a step."""
        return total_after(step)

    def _has_joined(self) -> None:
        """It has the state of another one."""

    def _run_step(self) -> None:
        self.transactions.run(self._step, self._state)

    def _step(self) -> None:
        step = self.membership.committed_steps + 1
        rows = ROWS // len(self._ranks) if self._ranks else 0
        for _ in range(self.exchanges_of_step):
            total = self.exchange.channel(STEPS).all_reduce(np.full(4, step * rows))
        self.after_exchange()
        if self._state.writes_late:
            answers: queue.SimpleQueue[str] = queue.SimpleQueue()
            self.transactions.ask_to_write(answers.put)
            if refusal := answers.get():
                raise tf.errors.InvalidArgumentError(None, None, refusal)
        self._state.values = self._state.values + total

    def _sum_over_workers(self, values: Any) -> Any:
        return self.exchange.channel(STEPS).all_reduce(np.array(values))

    def _give_state(self) -> None:
        parts = [_SentValues(self._state.values, self.before_state)]
        for request in self.group.donor.requests():
            if self.refusal:
                request.fail(self.refusal)
                continue
            self.group.donor.send(request, self.membership.committed_steps, parts)
            self.group.log.keep(True)

    def _connect(self, view: Any) -> None:
        self.exchange.close(has_ended=False)
        self.exchange = self.group.exchange(view)
        self._ranks = self.membership.ranks(view)


class ThreadWorkers:
    """The workers of a training.

    Args:
        size: How many there are.
        kind: Makes each of them.
        options: What else the group of each gets.
    """

    def __init__(self, size: int, kind: Callable[..., ThreadWorker] = ThreadWorker, **options: Any) -> None:
        self.addresses, self._kind, self.options = free_addresses(size), kind, options
        self.all: list[ThreadWorker] = []

    @property
    def trained(self) -> list[ThreadWorker]:
        """The workers that train, by rank."""
        return sorted((worker for worker in self.all if worker.trains), key=lambda worker: worker.rank)

    def start(self, rank: int, **options: Any) -> ThreadWorker:
        """Starts the worker of a rank."""
        worker = self._kind(rank, self.addresses, **{**self.options, **options})
        self.all.append(worker)
        return worker

    def of_rank(self, rank: int) -> ThreadWorker:
        """Returns the last worker of a rank."""
        return [worker for worker in self.all if worker.rank == rank][-1]

    def wait_for_steps(self, *ranks: int, steps: int = 5) -> None:
        """Waits until the workers of the ranks, and no others, train together and have made further steps."""

        def train_together() -> bool:
            workers = [self.of_rank(rank) for rank in ranks]
            for worker in workers:
                if worker.error is not None:
                    raise AssertionError(f"worker {worker.rank} has failed") from worker.error
            views = {worker.membership.view for worker in workers if worker.trains}
            return (
                all(worker.trains for worker in workers)
                and len(views) == 1
                and (workers[0].membership.ranks(views.pop()) == sorted(ranks))
            )

        wait_until(train_together, f"{ranks} train together")
        workers = [self.of_rank(rank) for rank in ranks]
        begin = max(worker.membership.committed_steps for worker in workers)
        wait_until(lambda: all(max(worker.totals, default=0) > begin + steps for worker in workers), "further steps")

    def finish(self) -> None:
        """Lets all end with one step, and checks the state of each worker, dead ones too, after each of its steps."""
        workers = self.trained
        last = max(worker.membership.committed_steps for worker in workers) + 20
        for worker in workers:
            worker.last_step = last
        for worker in workers:
            worker.thread.join(LIMIT_SECONDS)
            assert not worker.thread.is_alive(), f"worker {worker.rank} has not ended"
            assert worker.error is None, repr(worker.error)
            assert max(worker.totals) == last, (worker.rank, max(worker.totals), last)
        self.check()

    def check(self) -> None:
        """Checks the state of each worker after each of its steps."""
        for worker in self.all:
            wrong = {step: total for step, total in [*worker.totals.items()] if total != worker.total_after(step)}
            assert not wrong, (worker.rank, dict(sorted(wrong.items())[:5]))
            steps = sorted(worker.totals)
            assert steps == list(range(steps[0], steps[-1] + 1)) if steps else True, "a step is missing"

    def close(self) -> None:
        """Ends what is left."""
        for worker in self.all:
            worker.is_killed = True
            if worker.has_started:
                worker.kill()
        for worker in self.all:
            worker.thread.join(LIMIT_SECONDS)


@contextmanager
def training(size: int, group: type[ThreadWorkers] = ThreadWorkers, **options: Any) -> Iterator[ThreadWorkers]:
    """Within this context `size` workers train."""
    workers = group(size, **options)
    try:
        for rank in range(size):
            workers.start(rank)
        workers.wait_for_steps(*range(size))
        yield workers
    finally:
        workers.close()


class Faults:
    """What happens to messages of the membership."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cut: set[tuple[int, int]] = set()  # ranks: sender, receiver
        self._kills: dict[tuple[int, str], ThreadWorker] = {}
        self._killed: set[Membership] = set()
        send = Membership._send

        def faulty_send(membership: Membership, number: int, message: Any) -> None:
            place = membership.rank, number % len(self_ranks(membership))
            for kind in message:
                victim = self._kills.get((membership.rank, kind))
                if victim is not None and victim.has_started and victim.membership is membership:
                    del self._kills[membership.rank, kind]
                    self._killed.add(membership)
                    threading.Thread(target=victim.kill, daemon=True).start()
            if place not in self.cut and membership not in self._killed:
                send(membership, number, message)

        def self_ranks(membership: Membership) -> range:
            return range(membership._ranks)

        monkeypatch.setattr(Membership, "_send", faulty_send)

    def kill_at(self, worker: ThreadWorker, kind: str) -> None:
        """Kills a worker while it sends its next message of a kind, which nobody gets."""
        self._kills[worker.rank, kind] = worker

    def separate(self, *sides: tuple[int, ...]) -> None:
        """Drops all messages between ranks of different sides."""
        self.cut = {(a, b) for one in sides for other in sides if one != other for a in one for b in other}
