"""A server ends with its chief, and not by a signal that announces the end of the host."""

import signal
from unittest import mock

import pytest
import tensorflow as tf
from replaced_clocks import slept_clock

from tfdist.servers import serving


@pytest.fixture
def serve(monkeypatch):
    """`serve(chief)`: runs the server's loop without TensorFlow's server and without waiting."""
    monkeypatch.setattr(tf.distribute, "Server", lambda *_, **__: None)
    monkeypatch.setattr(serving, "_CHIEF_LOST_SECONDS", 0.01)
    monkeypatch.setattr(serving, "_POLL_SECONDS", 0.02)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def begin(answers):
        answers = iter(answers)
        monkeypatch.setattr(serving, "is_reachable", lambda *_: next(answers))
        serving.serve({"chief": ["a:1"], "worker": ["b:1"]}, "worker", 0)

    yield begin
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_it_serves_until_the_chief_that_it_has_seen_is_lost(serve):
    with pytest.raises(StopIteration):
        serve([False, False])
    serve([False, True, False])


def test_a_server_that_was_stopped_asks_for_the_chief_before_it_takes_it_for_lost(serve, monkeypatch):
    clock = slept_clock(monkeypatch, serving)

    def be_stopped():
        clock.now += 60.0

    clock.during = be_stopped
    with pytest.raises(StopIteration):
        serve([True, True])
    serve([True, True, False])


def test_it_does_not_wait_for_a_chief_without_limit(serve, monkeypatch):
    monkeypatch.setattr(serving, "_CHIEF_START_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="has not started after 0 s. Received: no answer from chief 0 at a:1"):
        serve([False, False])
    serve([True, False])  # a chief that was seen and is lost has ended


def test_under_tfdist_run_it_waits_as_long_as_the_chief_runs(serve, monkeypatch):
    monkeypatch.setattr(serving, "_CHIEF_START_SECONDS", 0.0)
    monkeypatch.setattr(serving.Heartbeat, "from_environment", lambda: mock.Mock())
    with pytest.raises(StopIteration):
        serve([False, False])


def test_a_notice_of_preemption_does_not_end_it(serve):
    """The chief saves then, and needs the variables of its servers."""
    serve([True, False])
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
