"""Workers of an elastic training are lost and join at every point, and each step counts on all or on none."""

import random
import threading

import pytest
from thread_workers import LIMIT_SECONDS, Faults, ThreadWorkers, training, wait_until

from tfdist.membership.membership_errors import LeftWorkersError


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_worker_is_lost_and_its_rank_joins(rank: int) -> None:
    others = sorted({0, 1, 2} - {rank})
    with training(3) as workers:
        workers.of_rank(rank).kill()
        workers.wait_for_steps(*others)
        workers.start(rank)
        workers.wait_for_steps(0, 1, 2)
        workers.finish()


def test_a_worker_that_joins_does_something_else_while_its_state_is_on_its_way() -> None:
    """The memory of what it receives is such that TensorFlow takes it without a copy."""
    with training(2) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        gate, results = threading.Event(), []
        workers.of_rank(0).before_state = lambda: gate.wait(60)
        late = workers.start(1, meanwhile=gate.set)
        wait_until(lambda: hasattr(late, "group"), "it starts")
        take = late.group.log.result
        late.group.log.result = lambda *call: results.append(take(*call)) or results[-1]
        workers.wait_for_steps(0, 1)
        assert gate.is_set()
        assert all(result.ctypes.data % 64 == 0 for result in results)
        workers.finish()


def test_more_workers_join_than_have_begun_and_some_leave() -> None:
    """Also one that starts before the first have begun."""
    workers = ThreadWorkers(4, beginning=2)
    try:
        for rank in (3, 0, 1):
            workers.start(rank)
        workers.wait_for_steps(0, 1, 3)
        workers.start(2)
        workers.wait_for_steps(0, 1, 2, 3)
        for rank in (0, 1):
            workers.of_rank(rank).kill()
            workers.wait_for_steps(*range(rank + 1, 4))
        workers.start(0)
        workers.wait_for_steps(0, 2, 3)
        workers.finish()
    finally:
        workers.close()


def test_a_worker_that_joins_does_not_wait_without_a_limit_for_others_to_begin() -> None:
    workers = ThreadWorkers(3, beginning=2, timeout_seconds=0.5)
    try:
        worker = workers.start(2)
        worker.thread.join(30)
        assert "Worker 2 joins a training of others, and none has begun in 0.5 s" in str(worker.error)
    finally:
        workers.close()


def test_of_two_workers_each_trains_on_alone() -> None:
    with training(2) as workers:
        for rank in (1, 0):
            workers.of_rank(rank).kill()
            workers.wait_for_steps(1 - rank)
            workers.start(rank)
            workers.wait_for_steps(0, 1)
        workers.finish()


def test_two_workers_are_lost_at_once_and_two_join_at_once() -> None:
    with training(4) as workers:
        for rank in (0, 2):
            workers.of_rank(rank).kill()
        workers.wait_for_steps(1, 3)
        for rank in (0, 2):
            workers.start(rank)
        workers.wait_for_steps(0, 1, 2, 3)
        workers.finish()


@pytest.mark.parametrize("kind", ["prepare", "accept", "install", "exclude"])
def test_the_oldest_worker_is_lost_while_a_change_is_agreed(faults: Faults, kind: str) -> None:
    with training(4) as workers:
        faults.kill_at(workers.of_rank(0), kind)
        workers.of_rank(2).kill()
        workers.wait_for_steps(1, 3)
        workers.finish()


@pytest.mark.parametrize("kind", ["ready", "promise", "accepted"])
def test_another_worker_is_lost_while_a_change_is_agreed(faults: Faults, kind: str) -> None:
    with training(4) as workers:
        faults.kill_at(workers.of_rank(3), kind)
        if kind != "ready":
            workers.of_rank(1).kill()
        workers.wait_for_steps(0, 2, *([1] if kind == "ready" else []))
        workers.finish()


@pytest.mark.parametrize("kind", ["joins", "promise", "accepted", "ready"])
def test_a_worker_that_joins_is_lost(faults: Faults, kind: str) -> None:
    with training(3) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0, 2)
        joins = workers.start(1)
        faults.kill_at(joins, kind)
        wait_until(lambda: joins.is_killed, f"it sends {kind}")
        workers.wait_for_steps(0, 2)
        workers.start(1)
        workers.wait_for_steps(0, 1, 2)
        workers.finish()


@pytest.mark.parametrize("kind", ["prepare", "accept", "install"])
def test_the_oldest_worker_is_lost_while_another_one_is_taken_in(faults: Faults, kind: str) -> None:
    with training(3) as workers:
        workers.of_rank(2).kill()
        workers.wait_for_steps(0, 1)
        faults.kill_at(workers.of_rank(0), kind)
        joins = workers.start(2)
        wait_until(lambda: workers.of_rank(0).is_killed, f"it sends {kind}")
        wait_until(lambda: joins.trains or joins.error is not None, "the worker that joins knows the result")
        if joins.error is not None:
            joins.thread.join()
            workers.start(2)
        workers.wait_for_steps(1, 2)
        workers.finish()


def _lose_and_add(workers: ThreadWorkers, size: int, events: int, seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(events):
        trained = [worker.rank for worker in workers.trained]
        missing = [rank for rank in range(size) if not workers.of_rank(rank).thread.is_alive()]
        if missing and (len(trained) == 1 or choose.random() < 0.5):
            workers.start(choose.choice(missing))
        elif len(trained) > 1:
            workers.of_rank(choose.choice(trained)).kill()
        wait = choose.random() < 0.5
        if wait:
            steps = max(max(worker.totals, default=0) for worker in workers.trained) + choose.randrange(10)
            wait_until(
                lambda steps=steps: any(max(worker.totals, default=0) >= steps for worker in workers.trained), "steps"
            )


@pytest.mark.parametrize(
    ("events", "seed"),
    [(10, 1), pytest.param(150, 2, marks=pytest.mark.long), pytest.param(150, 3, marks=pytest.mark.long)],
)
def test_workers_are_lost_and_join_at_random(events: int, seed: int) -> None:
    with training(4) as workers:
        _lose_and_add(workers, 4, events, seed)
        wait_until(lambda: all(w.trains or not w.thread.is_alive() for w in workers.all), "all have joined or ended")
        workers.wait_for_steps(*[worker.rank for worker in workers.trained])
        workers.finish()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rank", [0, 1])  # who says `ready` after its step, or within it
def test_a_step_does_not_wait_for_connections_that_have_failed(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed = threading.Event()

    def fail() -> None:
        raise OSError("of the connections")

    with training(2) as workers:
        worker, other = workers.of_rank(rank), workers.of_rank(1 - rank)
        other.after_exchange = lambda: has_failed.wait(LIMIT_SECONDS)
        wait_until(lambda: worker.membership._agreed.is_ready, "it waits for the other one")
        monkeypatch.setattr(worker.membership, "_check_silence", fail)
        wait_until(lambda: worker.error is not None, "it ends")
        assert isinstance(worker.error, LeftWorkersError)
        assert "of the connections" in str(worker.error)
        has_failed.set()
        workers.wait_for_steps(1 - rank)
