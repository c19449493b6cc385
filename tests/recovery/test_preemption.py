"""Signals on any worker: all workers stop after the same step. Here workers are threads, and steps a barrier."""

import os
import signal
import threading
import types

import pytest

from tfdist.recovery import preemption
from tfdist.recovery.preemption import Preemption

_LIMIT_SECONDS = 30


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(preemption, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def handlers():
    """The default handlers, which are there while a test runs."""
    numbers = signal.SIGTERM, signal.SIGUSR1
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield dict.fromkeys(numbers, signal.SIG_DFL)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_worker_stops_after_the_step_that_runs(agreements, handlers, number):
    stop = Preemption(agreements(1)[0])
    assert stop.listen()
    assert not stop.is_due(3)
    os.kill(os.getpid(), number)
    assert stop.is_due(4) and stop.is_due(5)
    stop.stop_listening()
    assert {of: signal.getsignal(of) for of in handlers} == handlers


def test_a_second_notice_ends_the_process_and_an_echo_of_the_first_does_not(agreements, handlers, clock, monkeypatch):
    stop, ended = Preemption(agreements(1)[0]), []
    stop.listen()
    signal.raise_signal(signal.SIGTERM)
    clock.now += 0.9
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == stop._heed
    clock.now += 0.2
    monkeypatch.setattr(preemption.os, "kill", lambda *told: ended.append(told))
    signal.raise_signal(signal.SIGTERM)
    assert ended == [(os.getpid(), signal.SIGTERM)] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_handlers_of_a_fit_that_an_exception_has_ended_are_passed_over(agreements, handlers):
    ended, stop = Preemption(agreements(1)[0]), Preemption(agreements(1)[0])
    ended.listen()
    stop.listen()
    stop.stop_listening()
    assert {of: signal.getsignal(of) for of in handlers} == handlers


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("told_ranks", [(0,), (2,), (0, 1, 2)], ids=str)
def test_all_stop_after_the_next_common_step(agreements, in_threads, told, told_ranks, at_once):
    ranks = [Preemption(agreement) for agreement in agreements(3)]
    collective = threading.Barrier(3)

    def be_slow(key):
        if threading.current_thread().name == "tfdist-preemption":
            threading.Event().wait(0.3)

    # All are slow to hear of it: whoever was told must wait for them before the next step.
    told.before_shared = be_slow

    def train(rank):
        ranks[rank].listen()
        for step in range(at_once, 20 * at_once, at_once):
            collective.wait(_LIMIT_SECONDS)
            if step == 5 * at_once and rank in told_ranks:
                ranks[rank]._heed(signal.SIGTERM, None)
            if ranks[rank].is_due(step):
                return step
        return None

    assert in_threads(train, (0, 1, 2)) == [6 * at_once] * 3


def test_who_is_told_after_the_training_waits_for_nobody(agreements, in_threads):
    ranks = [Preemption(agreement) for agreement in agreements(2)]

    def end(rank):
        ranks[rank].listen()
        ranks[rank].close()
        if rank == 0:
            ranks[rank]._heed(signal.SIGTERM, None)
        return any(ranks[rank].is_due(step) for step in (9, 10, 11))

    assert in_threads(end, (0, 1)) == [False, False]
    for thread in threading.enumerate():
        if thread.name == "tfdist-preemption":
            thread.join(_LIMIT_SECONDS)
            assert not thread.is_alive()


def test_a_signal_that_came_too_late_ends_the_next_fit(agreements, handlers, clock):
    late, following, after_it = (Preemption(agreements(1)[0]) for _ in range(3))
    late.listen()
    signal.raise_signal(signal.SIGTERM)
    late.close()
    late.stop_listening()
    clock.now += 0.5
    following.listen()
    signal.raise_signal(signal.SIGTERM)  # an echo of the first
    assert following.is_due(1)
    following.leave()
    after_it.listen()
    assert not after_it.is_due(1)
    after_it.stop_listening()
    assert {of: signal.getsignal(of) for of in handlers} == handlers
