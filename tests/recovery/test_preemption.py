"""Signals on any worker: all workers stop after the same step. Here workers are threads, and steps a barrier."""

import os
import signal
import threading

import pytest
from replaced_clocks import set_clock

from tfdist.recovery import preemption
from tfdist.recovery.preemption import PreemptionHandler

_LIMIT_SECONDS = 30


@pytest.fixture
def clock(monkeypatch):
    return set_clock(monkeypatch, preemption)


@pytest.fixture
def handlers():
    """Sets the default handlers while a test runs."""
    numbers = signal.SIGTERM, signal.SIGUSR1
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield dict.fromkeys(numbers, signal.SIG_DFL)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_worker_stops_after_the_current_step(coordinations, handlers, number):
    stop = PreemptionHandler(coordinations(1)[0])
    assert stop.install()
    assert not stop.is_due(3)
    os.kill(os.getpid(), number)
    assert stop.is_due(4) and stop.is_due(5)
    stop.uninstall()
    assert {of: signal.getsignal(of) for of in handlers} == handlers


def test_a_request_ends_the_training_once(coordinations, handlers):
    requested = threading.Event()
    requested.set()
    stop, following = (PreemptionHandler(coordinations(1)[0], requested=requested) for _ in range(2))
    assert stop.is_due(3)
    stop.mark_exiting()
    assert not following.is_due(1)


def test_a_second_notice_ends_the_process_and_an_echo_of_the_first_does_not(
    coordinations, handlers, clock, monkeypatch
):
    stop, ended = PreemptionHandler(coordinations(1)[0]), []
    stop.install()
    signal.raise_signal(signal.SIGTERM)
    clock.now += 0.9
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == stop._handle
    clock.now += 0.2
    monkeypatch.setattr(preemption.os, "kill", lambda *call: ended.append(call))
    signal.raise_signal(signal.SIGTERM)
    assert ended == [(os.getpid(), signal.SIGTERM)] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_handlers_of_a_fit_that_an_exception_ended_are_not_restored(coordinations, handlers):
    ended, stop = PreemptionHandler(coordinations(1)[0]), PreemptionHandler(coordinations(1)[0])
    ended.install()
    stop.install()
    stop.uninstall()
    assert {of: signal.getsignal(of) for of in handlers} == handlers


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("signalled", [(0,), (2,), (0, 1, 2)], ids=str)
def test_all_stop_after_the_next_common_step(coordinations, in_threads, key_values, signalled, at_once):
    ranks = [PreemptionHandler(coordination) for coordination in coordinations(3)]
    collective = threading.Barrier(3)

    def be_slow(key):
        if threading.current_thread().name == "tfdist-preemption":
            threading.Event().wait(0.3)

    # All learn of it late: the signalled worker must wait for them before the next step.
    key_values.before_read = be_slow

    def train(rank):
        ranks[rank].listen()
        for step in range(at_once, 20 * at_once, at_once):
            collective.wait(_LIMIT_SECONDS)
            if step == 5 * at_once and rank in signalled:
                ranks[rank]._handle(signal.SIGTERM, None)
            if ranks[rank].is_due(step):
                return step
        return None

    assert in_threads(train, (0, 1, 2)) == [6 * at_once] * 3


def test_a_worker_signalled_after_the_training_waits_for_nobody(coordinations, in_threads):
    ranks = [PreemptionHandler(coordination) for coordination in coordinations(2)]

    def end(rank):
        ranks[rank].listen()
        ranks[rank].close()
        if rank == 0:
            ranks[rank]._handle(signal.SIGTERM, None)
        return any(ranks[rank].is_due(step) for step in (9, 10, 11))

    assert in_threads(end, (0, 1)) == [False, False]
    for thread in threading.enumerate():
        if thread.name == "tfdist-preemption":
            thread.join(_LIMIT_SECONDS)
            assert not thread.is_alive()


def test_a_signal_that_arrives_too_late_ends_the_next_fit(coordinations, handlers, clock):
    late, following, after_it = (PreemptionHandler(coordinations(1)[0]) for _ in range(3))
    late.install()
    signal.raise_signal(signal.SIGTERM)
    late.close()
    late.uninstall()
    clock.now += 0.5
    following.install()
    signal.raise_signal(signal.SIGTERM)  # an echo of the first
    assert following.is_due(1)
    following.mark_exiting()
    after_it.install()
    assert not after_it.is_due(1)
    after_it.uninstall()
    assert {of: signal.getsignal(of) for of in handlers} == handlers
