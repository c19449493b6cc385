"""A node that has lost the coordinator connects again, and waits for nobody."""

import select
import signal
import socket
import threading
import time

import pytest

from tfdist.launch.rendezvous import reconnection as module
from tfdist.launch.rendezvous.coordinator_process import rendezvous_credentials
from tfdist.launch.rendezvous.reconnection import Reconnection
from tfdist.transport.nonblocking_connection import Listener

_LIMIT_SECONDS = 30.0


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def reconnection_to(server, token="0123456789abcdef"):
    return Reconnection("127.0.0.1", server.getsockname()[1], rendezvous_credentials(token))


def connect(reconnection):
    deadline = time.monotonic() + _LIMIT_SECONDS
    while (connection := reconnection.advance()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return connection


def test_it_connects_when_there_is_a_coordinator(server, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)
    nobody = socket.create_server(("127.0.0.1", 0))
    reconnection = reconnection_to(nobody)
    nobody.close()
    for _ in range(5):
        assert reconnection.advance() is None
        time.sleep(0.01)
    reconnection.close()
    listener, accepted, is_over = Listener(server, rendezvous_credentials("0123456789abcdef"), print), [], []

    def serve():
        while not is_over:
            accepted.extend(listener.accept(now=0.0))
            time.sleep(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    reconnection = reconnection_to(server)
    connection = connect(reconnection)
    is_over.append(True)
    thread.join()
    connection.send({"type": "hello"})
    assert next(message for message in _messages(accepted[0])) == {"type": "hello"}
    for opened in (connection, *accepted, listener, reconnection):
        opened.close()


def test_whoever_does_not_answer_as_a_coordinator_is_left_alone_for_a_while(server, monkeypatch):
    monkeypatch.setattr(module, "_HANDSHAKE_SECONDS", 0.05)
    reconnection = reconnection_to(server)
    began = time.monotonic()
    while reconnection._next_at == 0.0:
        assert reconnection.advance() is None
        assert time.monotonic() < began + _LIMIT_SECONDS
    server.settimeout(_LIMIT_SECONDS)
    server.accept()[0].close()
    server.setblocking(False)
    for _ in range(10):
        assert reconnection.advance() is None
    with pytest.raises(BlockingIOError):
        server.accept()
    assert reconnection._next_at > began + 5
    reconnection.close()


def test_a_name_that_no_name_server_knows_yet_is_not_waited_for(server, monkeypatch):
    is_numeric, look_up = [], socket.getaddrinfo

    def note(*arguments, flags=0, **options):
        is_numeric.append(bool(flags & socket.AI_NUMERICHOST))
        return look_up(*arguments, flags=flags, **options)

    monkeypatch.setattr(module.socket, "getaddrinfo", note)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "_LOOK_UP_SECONDS", 0.05)
    monkeypatch.setattr(module, "_LOOK_UP", "import time; time.sleep(1000)")
    reconnection = Reconnection("node-0", server.getsockname()[1], rendezvous_credentials("0123456789abcdef"))
    assert reconnection.advance() is None
    silent = reconnection._lookup
    _advance_until(reconnection, lambda: reconnection._lookup is None)
    assert silent._process.returncode == -signal.SIGKILL
    monkeypatch.setattr(module, "_LOOK_UP_SECONDS", _LIMIT_SECONDS)
    monkeypatch.setattr(module, "_LOOK_UP", "print('127.0.0.1')")
    _advance_until(reconnection, lambda: reconnection._socket is not None)
    server.settimeout(_LIMIT_SECONDS)
    server.accept()[0].close()
    reconnection.close()
    assert all(is_numeric)


def test_a_name_is_looked_up():
    lookups = [module._NameLookup(name) for name in ("localhost", "x" * 300)]
    for lookup in lookups:
        assert select.select([lookup._process.stdout], [], [], _LIMIT_SECONDS)[0]
    assert lookups[0].address() in ("127.0.0.1", "::1")
    with pytest.raises(socket.gaierror):
        lookups[1].address()
    for lookup in lookups:
        lookup.close()


def _advance_until(reconnection, condition):
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        assert reconnection.advance() is None and time.monotonic() < deadline
        time.sleep(0.005)


def _messages(connection):
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        yield from connection.receive()
