"""Workers are lost and join at each step of an accumulation, and nobody's rows are missing."""

import functools
import random
import threading
from collections.abc import Callable

import pytest
from accumulating_workers import MICRO_STEPS, AccumulatingWorker
from thread_workers import Faults, ThreadWorkers, training, wait_until

from tfdist.exchange.exchange_errors import ExchangeError

_long = functools.partial(pytest.param, marks=pytest.mark.long)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def _kill_in(
    worker: AccumulatingWorker, place: int, *, after_exchange: bool = False, before: Callable[[], None] = lambda: None
) -> threading.Event:
    """Kills a worker in a step at a place of an accumulation, from 1 on; the event says that the step was reached."""
    reached = threading.Event()

    def kill(number: int) -> None:
        if (number - 1) % MICRO_STEPS + 1 != place or reached.is_set() or number < MICRO_STEPS:
            return
        before()
        reached.set()
        if after_exchange:
            worker.after_exchange = worker.kill
        else:
            worker.kill()

    worker.before_micro_step = kill
    return reached


@pytest.mark.parametrize("after_exchange", [False, True])
@pytest.mark.parametrize(
    ("rank", "place"),
    [
        (rank, place) if (rank, place) in [(0, 3), (1, MICRO_STEPS)] else _long(rank, place)
        for rank in (0, 1)
        for place in range(1, MICRO_STEPS + 1)
    ],
)
def test_a_worker_is_lost_at_each_step_of_an_accumulation(rank: int, place: int, after_exchange: bool) -> None:
    with training(3, kind=AccumulatingWorker) as workers:
        reached = _kill_in(workers.of_rank(rank), place, after_exchange=after_exchange)
        wait_until(reached.is_set, "the step")
        others = sorted({0, 1, 2} - {rank})
        workers.wait_for_steps(*others)
        for other in others:
            survivor = workers.of_rank(other)
            # Those that have all sums of a step commit it without the lost worker.
            expected = (place - 1, place % MICRO_STEPS) if after_exchange else (place - 1,)
            assert len(survivor.again) in expected, survivor.again
            changes = survivor.transactions.changes
            assert changes.repeated_steps in (len(survivor.again), len(survivor.again) + 1), changes
        workers.start(rank)
        workers.wait_for_steps(0, 1, 2)
        workers.finish()


@pytest.mark.parametrize("place", [2, _long(3), _long(MICRO_STEPS)])
def test_two_workers_are_lost_in_one_accumulation(place: int) -> None:
    """The second one while the steps of the accumulation are computed again."""
    with training(4, kind=AccumulatingWorker) as workers:
        second = workers.of_rank(2)
        reached = _kill_in(workers.of_rank(0), place)

        def kill_if_again(number: int) -> None:
            if number != second._present:
                second.kill()

        second.before_micro_step = kill_if_again
        wait_until(reached.is_set, "the step")
        wait_until(lambda: second.is_killed, "the steps are computed again")
        workers.wait_for_steps(1, 3)
        workers.finish()


@pytest.mark.parametrize("kind", ["ready", _long("promise"), _long("accepted")])
def test_another_worker_is_lost_while_a_change_within_an_accumulation_is_agreed(faults: Faults, kind: str) -> None:
    with training(4, kind=AccumulatingWorker) as workers:
        other = workers.of_rank(3)
        reached = _kill_in(workers.of_rank(1), 3, before=lambda: faults.kill_at(other, kind))
        wait_until(reached.is_set, "the step")
        workers.wait_for_steps(0, 2)
        workers.finish()


def test_a_worker_that_joins_takes_over_when_all_others_are_lost_in_the_accumulation() -> None:
    """It does not know whose rows are in the sums, and has none itself."""
    with training(2, kind=AccumulatingWorker) as workers:
        old, lost = workers.of_rank(0), False
        while not lost:
            workers.of_rank(1).kill()
            workers.wait_for_steps(0)
            new, has_connected = workers.start(1), threading.Event()
            wait_until(lambda new=new: new.has_started, "it starts")
            connect = new.transactions._connect

            def follow(view: object, new=new, connect=connect, has_connected=has_connected) -> None:  # type: ignore[no-untyped-def]
                nonlocal lost
                connect(view)
                # Otherwise another one has to join: a step of validation may also follow the last of an accumulation.
                if not has_connected.is_set() and new._accumulation.view_of_sums is not None:
                    lost = True
                    old.kill()
                has_connected.set()

            new.transactions._connect = follow
            wait_until(has_connected.is_set, "it joins")
        workers.wait_for_steps(1)
        assert new.again
        workers.finish()


class _RestoredWithinAnAccumulation(AccumulatingWorker):
    """A worker that begins with sums of earlier steps; that of rank 2 is lost in the next step but one."""

    restored = 2

    def _micro_step(self, number: int) -> None:
        if (self.rank, number) == (2, self.restored + 2):
            self.kill()
        super()._micro_step(number)


def test_a_loss_of_sums_that_a_checkpoint_has_restored_is_an_error_on_all() -> None:
    workers = ThreadWorkers(3, kind=_RestoredWithinAnAccumulation)
    try:
        for rank in range(3):
            workers.start(rank)
        for rank in (0, 1):
            wait_until(lambda rank=rank: workers.of_rank(rank).error is not None, "it stops")
            error = workers.of_rank(rank).error
            assert isinstance(error, ExchangeError) and "lost with gradients that it had" in str(error), repr(error)
    finally:
        workers.close()


def _lose_and_add(workers: ThreadWorkers, size: int, events: int, seed: int) -> None:
    choose, doomed = random.Random(seed), set()
    for _ in range(events):
        left = [worker for worker in workers.trained if worker not in doomed]
        missing = [rank for rank in range(size) if not workers.of_rank(rank).thread.is_alive()]
        if missing and (len(left) == 1 or choose.random() < 0.5):
            workers.start(choose.choice(missing))
        elif len(left) > 1:
            worker = choose.choice(left)
            doomed.add(worker)
            _kill_in(worker, choose.randrange(1, MICRO_STEPS + 1))
        begin = max(max(worker.totals, default=0) for worker in left)
        steps = begin + choose.randrange(2 * MICRO_STEPS)
        wait_until(lambda left=left, steps=steps: any(max(one.totals, default=0) >= steps for one in left), "steps")
    wait_until(lambda: all(worker.is_killed for worker in doomed), "all losses")


@pytest.mark.parametrize(("events", "seed"), [(10, 1), _long(100, 2), _long(100, 3)])
def test_workers_are_lost_and_join_at_random(events: int, seed: int) -> None:
    with training(4, kind=AccumulatingWorker) as workers:
        _lose_and_add(workers, 4, events, seed)
        wait_until(lambda: all(w.trains or not w.thread.is_alive() for w in workers.all), "all have joined or ended")
        workers.wait_for_steps(*[worker.rank for worker in workers.trained])
        workers.finish()
