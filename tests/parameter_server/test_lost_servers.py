"""Parameter servers that are gone are named; those that are late once are not."""

import contextlib
import socket

import pytest
import tensorflow as tf

from tfdist.parameter_server import lost_servers
from tfdist.parameter_server.lost_servers import Servers, names_lost_servers

pytestmark = pytest.mark.usefixtures("cpus")


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def listening():
    """Makes sockets that take connections, and their addresses."""
    with contextlib.ExitStack() as stack:

        def listen():
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            return listener, f"127.0.0.1:{listener.getsockname()[1]}"

        yield listen


def look_after(servers, clock, seconds):
    clock.now += seconds
    servers.look()


def test_a_server_that_misses_three_looks_is_lost(listening, monkeypatch):
    monkeypatch.setattr(lost_servers, "time", clock := Clock())
    (_, one), (listener, other) = listening(), listening()
    servers = Servers([one, other])
    look_after(servers, clock, 1.1)
    listener.close()
    for _ in range(20):
        look_after(servers, clock, 0.1)  # two looks in two seconds
    with pytest.raises(tf.errors.UnavailableError) as caught:
        look_after(servers, clock, 1.1)
    assert f"no answer from ps 1 at {other}. Expected: all 2 up" in caught.value.message


def test_a_server_that_answers_again_is_not_lost(monkeypatch):
    monkeypatch.setattr(lost_servers, "time", clock := Clock())
    answers = iter([False, False, True, False, False, True])
    monkeypatch.setattr(lost_servers, "is_reachable", lambda address: next(answers))
    servers = Servers(["somewhere:1"])
    for _ in range(6):
        look_after(servers, clock, 1.1)
    with pytest.raises(StopIteration):
        look_after(servers, clock, 1.1)


class Trains:
    def __init__(self, address):
        self.servers = Servers([address])

    @names_lost_servers
    def train(self, error):
        if error is not None:
            raise error
        return "logs"


def test_an_error_is_explained_by_the_server_that_is_gone(listening):
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
