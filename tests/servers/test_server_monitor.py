"""Lost parameter servers are named; a server that misses one check is not lost."""

import contextlib
import socket
import threading
import time

import pytest
import tensorflow as tf

from tfdist.servers import server_monitor
from tfdist.servers.server_monitor import ServerMonitor, explains_lost_servers

pytestmark = pytest.mark.usefixtures("cpus")


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def listening():
    """Creates sockets that accept connections; returns each with its address."""
    with contextlib.ExitStack() as stack:

        def listen():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            return listener, f"127.0.0.1:{listener.getsockname()[1]}"

        yield listen


def check_after(servers, clock, seconds):
    clock.now += seconds
    servers.check()


def test_a_server_that_misses_three_checks_is_lost(listening, monkeypatch):
    monkeypatch.setattr(server_monitor, "time", clock := Clock())
    (_, one), (listener, other) = listening(), listening()
    servers = ServerMonitor("worker", [one, other])
    check_after(servers, clock, 1.1)
    listener.close()
    for _ in range(20):
        check_after(servers, clock, 0.1)  # two checks in two seconds
    with pytest.raises(tf.errors.UnavailableError) as caught:
        check_after(servers, clock, 1.1)
    assert f"no answer from worker 1 at {other}. Expected: all 2 of them until" in caught.value.message


def test_a_server_that_answers_again_is_not_lost(monkeypatch):
    monkeypatch.setattr(server_monitor, "time", clock := Clock())
    answers = iter([False, False, True, False, False, True])
    monkeypatch.setattr(server_monitor, "is_reachable", lambda *_: next(answers))
    servers = ServerMonitor("ps", ["somewhere:1"])
    for _ in range(6):
        check_after(servers, clock, 1.1)
    with pytest.raises(StopIteration):
        check_after(servers, clock, 1.1)


def test_a_server_that_does_not_answer_has_the_time_of_a_slow_link(monkeypatch):
    """A busy link delays or loses the packets of a connection; a host without the server refuses it."""
    monkeypatch.setattr(server_monitor, "time", clock := Clock())
    silent, ended, answers = threading.Event(), threading.Event(), iter([True, False])

    def is_reachable(address, seconds=1.0):
        if seconds > 1:
            assert silent.wait(20)
            ended.set()
            return next(answers)
        clock.now += 1.0  # the connection was not answered
        return False

    monkeypatch.setattr(server_monitor, "is_reachable", is_reachable)
    servers = ServerMonitor("ps", ["somewhere:1"])
    for _ in range(20):
        check_after(servers, clock, 1.1)
    silent.set()
    assert ended.wait(20)  # it has answered
    silent.clear()
    ended.clear()
    wait_for(lambda: all(check.result is not None for check in servers._long_checks.values()))
    check_after(servers, clock, 1.1)
    check_after(servers, clock, 1.1)
    silent.set()
    wait_for(lambda: all(check.result is not None for check in servers._long_checks.values()))
    with pytest.raises(tf.errors.UnavailableError, match="no answer from ps 0 at somewhere:1"):
        check_after(servers, clock, 1.1)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Trains:
    def __init__(self, address):
        self.servers = ServerMonitor("ps", [address])

    @explains_lost_servers
    def train(self, error):
        if error is not None:
            raise error
        return "logs"


def test_an_error_names_the_lost_server(listening):
    listener, address = listening()
    trains = Trains(address)
    error = tf.errors.CancelledError(None, None, "of the user's function")
    assert trains.train(None) == "logs"
    with pytest.raises(tf.errors.CancelledError, match="of the user's function"):
        trains.train(error)
    listener.close()
    assert trains.train(None) == "logs"
    with pytest.raises(tf.errors.UnavailableError, match=f"no answer from ps 0 at {address}") as caught:
        trains.train(error)
    assert caught.value.__cause__ is error
    with pytest.raises(KeyError):
        trains.train(KeyError("which no server makes"))
