"""A supervisor dials servers that are not its coordinator."""

import contextlib
import dataclasses
import socket
import threading

import pytest

from tfdist.launch.rendezvous.coordinator_process import rendezvous_credentials
from tfdist.launch.rendezvous.node_client import connect_to_coordinator
from tfdist.transport import nonblocking_connection as connections
from tfdist.transport.authenticated_messages import MAX_HANDSHAKE_BYTES, FrameBuffer, encode_frame
from tfdist.transport.handshake import Hello, ServerHandshake
from tfdist.transport.transport_errors import HandshakeError
from tfdist.utils.argument_checks import UsageError

TOKEN = "0123456789abcdef"
LIMIT_SECONDS = 20


def serve_once(answer):
    """A server that answers one connection; returns its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def run():
        with server, server.accept()[0] as connection:
            connection.settimeout(LIMIT_SECONDS)
            with contextlib.suppress(OSError):
                answer(connection)

    threading.Thread(target=run, daemon=True).start()
    return server.getsockname()[1]


def frames(connection):
    buffer = FrameBuffer(max_bytes=MAX_HANDSHAKE_BYTES)
    while True:
        while (body := buffer.next()) is None:
            data = connection.recv(4096)
            if not data:
                return
            buffer.feed(data)
        yield body


def connect(port, timeout_seconds=LIMIT_SECONDS):
    return connect_to_coordinator("127.0.0.1", port, TOKEN, timeout_seconds=timeout_seconds, say=lambda text: None)


def hello(**changed):
    own = dataclasses.replace(Hello.of(rendezvous_credentials(TOKEN), is_client=False), **changed)
    return encode_frame(own.encode())


def test_other_version():
    with pytest.raises(UsageError, match="different versions of tfdist.*the other side is tfdist 9.9.9"):
        connect(serve_once(lambda connection: connection.sendall(hello(version="9.9.9"))))


def test_other_token():
    def answer(connection):
        handshake = ServerHandshake(rendezvous_credentials("another token...."))
        for body in frames(connection):
            try:
                connection.sendall(encode_frame(handshake.receive(body)))
            except HandshakeError as error:
                connection.sendall(encode_frame(error.reply))

    with pytest.raises(UsageError, match=r"^The token is wrong. Received: a token that the rendezvous at 127.0.0.1:"):
        connect(serve_once(answer))


def test_reflecting_server():
    """The client's hello and proof, sent back to it, prove nothing."""

    def answer(connection):
        for body in frames(connection):
            connection.sendall(encode_frame(body))

    with pytest.raises(UsageError, match="does not know the token"):
        connect(serve_once(answer))


def test_silent_server(monkeypatch):
    monkeypatch.setattr(connections, "_TRY_SECONDS", 0.2)
    is_over = threading.Event()
    with pytest.raises(UsageError, match="did not answer. Received: (the handshake )?timed out"):
        connect(serve_once(lambda connection: is_over.wait(LIMIT_SECONDS)), timeout_seconds=0.5)
    is_over.set()


def test_slow_server(monkeypatch):
    """Single bytes do not extend the deadline."""
    monkeypatch.setattr(connections, "_TRY_SECONDS", 0.4)
    is_over = threading.Event()

    def answer(connection):
        for byte in hello():
            connection.sendall(bytes([byte]))
            if is_over.wait(0.1):
                return

    with pytest.raises(UsageError, match="did not answer"):
        connect(serve_once(answer), timeout_seconds=0.5)
    is_over.set()


def test_no_server():
    refused = r"did not answer. Received: .* for 0.3 s. Expected: tfdist run --node-rank 0"
    with socket.socket() as holder:  # which does not listen
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(UsageError, match=refused):
            connect(holder.getsockname()[1], timeout_seconds=0.3)
