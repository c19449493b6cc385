"""What else goes wrong: silence, cuts, failures of connections, ends and forks."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from thread_workers import Faults, ThreadWorkers, training, wait_until

from tfdist.membership.membership_errors import LeftWorkersError, NoMajorityError

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
# Trains like a `ThreadWorker`, in a process that a test can stop and kill. It says when it has begun.
WORKER = """
import os, sys, time
import numpy as np
from tfdist.exchange.exchange_errors import ExchangeError
from tfdist.exchange.worker_exchange import STEPS
from tfdist.membership.elastic_group import ElasticGroup

rank, kind, addresses = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
group = ElasticGroup(rank, addresses, token="t", cluster="c", offer=dict, timeout_seconds=30.0,
                     silence_seconds=20.0 if kind == "forks" else 2.0, encryption=None)
view = group.membership.view
exchange = group.exchange(view)
child = 0
if kind == "forks" and (child := os.fork()) == 0:
    time.sleep(300)
    os._exit(0)
print(child, flush=True)
try:
    while True:
        step = group.membership.committed_steps + 1
        try:
            exchange.channel(STEPS).all_reduce(np.full(4, step * 60 // len(addresses)))
            group.membership.commit(view)
        except ExchangeError:
            group.membership.wait_for_view()
            raise
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture
def process_of_rank_0(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], ThreadWorkers, int]]:
    """A worker of rank 0 in a process, three workers in all, and the child of that process."""
    workers = ThreadWorkers(3, silence_seconds=20.0 if request.param == "forks" else 2.0)
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, "0", request.param, *workers.addresses],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for rank in (1, 2):
        workers.start(rank)
    child = int(process.stdout.readline())
    try:
        wait_until(lambda: len(workers.trained) == 2 and all(len(w.totals) > 5 for w in workers.trained), "steps")
        yield process, workers, child
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
        if child:
            os.kill(child, signal.SIGKILL)
        workers.close()


@pytest.mark.parametrize("process_of_rank_0", ["stops"], indirect=True)
def test_a_frozen_worker_is_excluded_and_the_others_train_on(process_of_rank_0: Any) -> None:
    process, workers, _ = process_of_rank_0
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    workers.wait_for_steps(1, 2)
    assert time.monotonic() - began < 20, "silence is noticed after its limit of 2 s"
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdout.readline() == "ExcludedWorkerError\n"
    workers.finish()


@pytest.mark.parametrize("process_of_rank_0", ["forks"], indirect=True)
def test_a_forked_child_keeps_no_connection_open(process_of_rank_0: Any) -> None:
    process, workers, _ = process_of_rank_0
    process.kill()
    began = time.monotonic()
    workers.wait_for_steps(1, 2)
    assert time.monotonic() - began < 15, "it was noticed by silence"
    workers.finish()


@pytest.mark.parametrize(("minority", "majority"), [((2,), (0, 1)), ((0,), (1, 2)), ((0, 3), (1, 2, 4))])
def test_a_minority_stops(faults: Faults, minority: tuple[int, ...], majority: tuple[int, ...]) -> None:
    with training(len(minority + majority), silence_seconds=1.0, majority_seconds=1.0) as workers:
        faults.separate(minority, majority)
        workers.wait_for_steps(*majority)
        for rank in minority:
            wait_until(lambda rank=rank: workers.of_rank(rank).error is not None, f"worker {rank} stops")
            error = workers.of_rank(rank).error
            assert isinstance(error, NoMajorityError) and "may train without them" in str(error), repr(error)
        workers.finish()


def test_all_of_a_minority_stop_though_one_of_them_does_not_end(faults: Faults) -> None:
    with training(5, silence_seconds=1.0, majority_seconds=1.0) as workers:
        workers.of_rank(0).is_stuck = True  # its process lives on after its error
        faults.separate((0, 1), (2, 3, 4))
        wait_until(lambda: all(workers.of_rank(rank).error is not None for rank in (0, 1)), "both stop")
        assert all(isinstance(workers.of_rank(rank).error, NoMajorityError) for rank in (0, 1))


@pytest.mark.parametrize("direction", [(0, 1), (1, 0)])
def test_of_two_workers_that_do_not_hear_each_other_one_trains_on(faults: Faults, direction: tuple[int, int]) -> None:
    with training(2, silence_seconds=1.0, majority_seconds=1.0) as workers:
        faults.cut = {direction}
        wait_until(lambda: workers.of_rank(1).error is not None, "the younger one stops")
        workers.wait_for_steps(0)
        workers.finish()


def test_messages_that_mean_nothing_do_not_prove_that_their_sender_has_ended() -> None:
    with training(2, silence_seconds=1.0, majority_seconds=1.0) as workers:
        one = workers.of_rank(1).membership
        with one._changed:
            one._send(0, {"prepare": 7})
        wait_until(lambda: workers.of_rank(1).error is not None, "the younger one stops")
        workers.wait_for_steps(0)
        workers.finish()


def test_sums_of_a_view_that_has_ended_do_not_count() -> None:
    """A worker may have all sums of a step, and say so only when the others have another view."""
    with training(3) as workers:
        late, waits = workers.of_rank(1), threading.Event()

        def wait_for_another_view() -> None:
            late.after_exchange = lambda: None
            before = late.membership.view
            waits.set()
            wait_until(lambda: late.membership.view != before, "another view")

        late.after_exchange = wait_for_another_view
        assert waits.wait(30)
        workers.of_rank(2).kill()
        workers.wait_for_steps(0, 1)
        workers.finish()


def test_a_view_that_ends_while_a_worker_connects_with_it_interrupts_it() -> None:
    with training(4) as workers:
        slow, waits, follow = workers.of_rank(1), threading.Event(), workers.of_rank(1)._connect

        def connect(view: Any) -> None:
            slow.transactions._connect = follow
            waits.set()
            wait_until(lambda: slow.membership.view != view, "another view")
            follow(view)

        slow.transactions._connect = connect
        workers.of_rank(3).kill()
        assert waits.wait(30)
        workers.of_rank(2).kill()
        began = time.monotonic()
        workers.wait_for_steps(0, 1)
        assert time.monotonic() - began < 20, "the worker has waited for those of the earlier view"
        workers.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exchange_that_fails_without_a_lost_worker_begins_another_view(rank: int) -> None:
    with training(2) as workers:
        membership = workers.of_rank(0).membership
        before = membership.view
        membership.report_failure(before, 0, patience_seconds=0.1)
        wait_until(lambda: membership.view != before, "another view")
        workers.wait_for_steps(0, 1)
        workers.finish()


def test_a_worker_whose_connections_fail_stops_and_the_others_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(3) as workers:
        broken = workers.of_rank(1).membership
        monkeypatch.setattr(broken, "_check_silence", lambda: 1 / 0)
        workers.wait_for_steps(0, 2)
        wait_until(lambda: workers.of_rank(1).error is not None, "it stops")
        assert isinstance(workers.of_rank(1).error, LeftWorkersError)
        assert "ZeroDivisionError" in str(workers.of_rank(1).error)
        workers.finish()


def test_close_ends_a_wait_for_the_others(faults: Faults) -> None:
    with training(2) as workers:
        one = workers.of_rank(1)
        faults.cut = {(0, 1)}
        wait_until(lambda: one.membership._agreed.is_ready, "it waits for worker 0")
        one.group.close()
        one.thread.join(30)
        assert isinstance(one.error, LeftWorkersError)
        workers.wait_for_steps(0)
        workers.finish()


def test_nothing_is_left_when_workers_have_ended() -> None:
    earlier = set(threading.enumerate())  # of other tests in this process

    def has_no_thread() -> bool:
        return not set(threading.enumerate()) - earlier

    def descriptors() -> int:
        gc.collect()  # what exchanges hold
        return len(os.listdir("/proc/self/fd"))

    with training(2) as workers:
        workers.finish()
    del workers
    wait_until(has_no_thread, "no thread")
    before = descriptors()
    with training(3) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0, 2)
        workers.start(1)
        workers.wait_for_steps(0, 1, 2)
        workers.finish()
    del workers
    wait_until(has_no_thread, "no thread")
    wait_until(lambda: descriptors() <= before, f"{before} descriptors were there")


def test_nothing_is_left_of_a_start_that_fails() -> None:
    gc.collect()  # of other tests
    before, earlier = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    workers = ThreadWorkers(2, timeout_seconds=0.3)
    alone = workers.start(0)
    alone.thread.join(30)
    assert isinstance(alone.error, TimeoutError)
    wait_until(lambda: not set(threading.enumerate()) - earlier - {alone.thread}, "no thread")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "no descriptor")


def test_a_process_trains_twice() -> None:
    with training(3) as workers:
        workers.finish()
        addresses = workers.addresses
        again = ThreadWorkers(3)
        again.addresses = addresses
        try:
            for rank in range(3):
                again.start(rank)
            again.wait_for_steps(0, 1, 2)
            again.finish()
        finally:
            again.close()


def test_the_oldest_worker_may_end_right_after_its_last_step() -> None:
    with training(3) as workers:
        last = max(worker.membership.committed_steps for worker in workers.trained) + 20
        for worker in workers.trained:
            worker.last_step = last
        for rank in (1, 2):
            slow = workers.of_rank(rank)
            slow.after_exchange = lambda slow=slow: (
                wait_until(
                    lambda: not workers.of_rank(0).thread.is_alive() or slow.membership.committed_steps < last - 1,
                    "the oldest worker has ended",
                )
                if slow.membership.committed_steps == last
                else None
            )
        for worker in workers.all:
            worker.thread.join(60)
            assert worker.error is None and max(worker.totals) == last
        workers.check()
