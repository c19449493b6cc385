"""Signals that ask a worker to leave: the first one waits for a step, a second one ends the process."""

import os
import signal
from types import SimpleNamespace

import pytest
from replaced_clocks import set_clock

from tfdist.elastic import leave_signals
from tfdist.elastic.elastic_fit import ElasticFit
from tfdist.elastic.leave_signals import LeaveSignals
from tfdist.elastic.loop_member import LoopMember


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ended(monkeypatch):
    """What would have ended this process."""
    calls = []
    monkeypatch.setattr(leave_signals.os, "kill", lambda *call: calls.append(call))
    return calls


@pytest.fixture
def clock(monkeypatch):
    return set_clock(monkeypatch, leave_signals)


def _of_fit():
    """Begins to handle signals; returns what ends that, and how often the worker was asked to leave."""
    asked = []
    membership = SimpleNamespace(leave_after_step=lambda: asked.append(True), is_member=True)
    transactions = SimpleNamespace(group=SimpleNamespace(membership=membership), fits=0, changes=None)
    fit = ElasticFit(transactions, None, None, None)
    fit._signals.handle([signal.SIGTERM])
    return fit._signals.restore, lambda: len(asked)


def _of_loop():
    """Likewise, in a custom loop."""
    options = {"others": tuple, "overwritten": tuple, "take_no_rows": None, "share_metrics": None}
    member = LoopMember(SimpleNamespace(group=None), None, **options)
    return member.handle_signal(), lambda: member._is_asked_to_leave


@pytest.mark.parametrize("begin", [_of_fit, _of_loop])
def test_a_second_signal_ends_the_process_and_an_echo_of_the_first_does_not(begin, clock, ended):
    _, asked = begin()
    assert asked() == 0
    signal.raise_signal(signal.SIGTERM)
    clock.now += 0.9
    signal.raise_signal(signal.SIGTERM)
    assert (asked(), ended) == (1, [])
    clock.now += 0.2
    signal.raise_signal(signal.SIGTERM)
    assert ended == [(os.getpid(), signal.SIGTERM)] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert asked() == 1


@pytest.mark.parametrize("begin", [_of_fit, _of_loop])
def test_a_handler_that_the_program_has_set_meanwhile_stays(begin):
    own = lambda number, frame: None  # noqa: E731
    restore, _ = begin()
    signal.signal(signal.SIGTERM, own)
    restore()
    assert signal.getsignal(signal.SIGTERM) == own
    begin()
    assert signal.getsignal(signal.SIGTERM) == own, "the program handles the signal itself"


def test_a_pass_within_another_one_leaves_its_handler():
    outer, inner = LeaveSignals(lambda: None), LeaveSignals(lambda: None)
    outer.handle([signal.SIGTERM])
    inner.handle([signal.SIGTERM])
    inner.restore()
    assert signal.getsignal(signal.SIGTERM) == outer._handle
    outer.restore()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_that_comes_too_late_has_its_default_action(monkeypatch):
    raised, signals = [], LeaveSignals(lambda: None)
    signals.handle([signal.SIGTERM])
    signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(leave_signals.signal, "raise_signal", raised.append)
    signals.restore()
    signals.restore()
    assert raised == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
