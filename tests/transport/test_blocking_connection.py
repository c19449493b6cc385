"""Messages and raw bytes over a blocking connection."""

import array
import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time

import pytest

from tfdist.transport.authenticated_messages import MAX_HANDSHAKE_BYTES, MAX_MESSAGE_BYTES, encode_frame
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.handshake import Credentials, Hello, SessionKeys
from tfdist.transport.transport_errors import ConnectionClosedError, FrameError, TokenRejectedError

LIMIT_SECONDS = 60


@pytest.fixture
def pair():
    """The two ends of a connection, and the socket of the first."""
    ours, theirs = socket.socketpair()
    connections = (
        BlockingConnection(ours, SessionKeys(b"client", b"server")),
        BlockingConnection(theirs, SessionKeys(b"server", b"client")),
    )
    yield *connections, ours
    for connection in connections:
        connection.close()


def _unread_bytes(socket_):
    count = array.array("i", [0])
    fcntl.ioctl(socket_, termios.TIOCOUTQ, count)
    return count[0]


@pytest.mark.parametrize("token", ["0123456789abcdef", "another token...."])
def test_handshake(token):
    near, far = socket.socketpair()
    result = []

    def accept():
        credentials = Credentials("tfdist test", 1, "0123456789abcdef")
        with contextlib.suppress(TokenRejectedError):
            result.append(BlockingConnection.accept(far, credentials, timeout_seconds=LIMIT_SECONDS))

    thread = threading.Thread(target=accept)
    thread.start()
    expected = contextlib.nullcontext() if token.startswith("0") else pytest.raises(TokenRejectedError)
    with expected:
        connection = BlockingConnection.connect(
            near, Credentials("tfdist test", 1, token), timeout_seconds=LIMIT_SECONDS
        )
    thread.join()
    for server in result:
        connection.send({"number": 1})
        assert server.receive(LIMIT_SECONDS) == {"number": 1}
        connection.close(), server.close()
    assert len(result) == token.startswith("0") and near.fileno() == far.fileno() == -1


def test_handshake_has_a_deadline():
    near, far = socket.socketpair()
    with far, pytest.raises(ConnectionClosedError, match="no answer in time"):
        BlockingConnection.connect(near, Credentials("tfdist test", 1, "0123456789abcdef"), timeout_seconds=0.05)
    assert near.fileno() == -1


@pytest.mark.parametrize("open_connection", [BlockingConnection.connect, BlockingConnection.accept])
def test_handshake_limits_what_it_reads(open_connection):
    near, far = socket.socketpair()
    far.sendall(struct.pack("!I", MAX_HANDSHAKE_BYTES + 1))
    with far, pytest.raises(FrameError, match="a message of 1025 bytes exceeds the limit of 1024"):
        open_connection(near, Credentials("tfdist test", 1, "0123456789abcdef"), timeout_seconds=LIMIT_SECONDS)
    assert near.fileno() == -1


def test_server_that_refuses_before_the_proof_arrives():
    """The client reports the reason, not the broken connection."""
    near, far = socket.socketpair()
    credentials = Credentials("tfdist test", 1, "0123456789abcdef")

    def refuse():
        far.recv(4096)
        far.shutdown(socket.SHUT_RD)  # the client cannot send its proof
        far.sendall(encode_frame(Hello.of(credentials, is_client=False).encode()))
        far.sendall(encode_frame(b'{"refused": "wrong token"}'))

    thread = threading.Thread(target=refuse)
    thread.start()
    with far, pytest.raises(TokenRejectedError):
        BlockingConnection.connect(near, credentials, timeout_seconds=LIMIT_SECONDS)
    thread.join()


def test_oversized_message(pair):
    _, theirs, socket_ = pair
    socket_.sendall(struct.pack("!I", MAX_MESSAGE_BYTES + 33))
    with pytest.raises(ConnectionClosedError, match="exceeds the limit"):
        theirs.receive(LIMIT_SECONDS)


def test_incomplete_message(pair):
    _, theirs, socket_ = pair
    socket_.sendall(struct.pack("!I", 100) + b'{"do"')
    with pytest.raises(ConnectionClosedError, match="no answer in time"):
        theirs.receive(0.05)


def test_manipulated_message(pair):
    ours, theirs, _ = pair
    ours.send({"number": 1})
    theirs._codec._receive_key = b"another key"
    with pytest.raises(ConnectionClosedError, match="not authentic"):
        theirs.receive(LIMIT_SECONDS)


def test_is_open(pair):
    ours, theirs, _ = pair
    with pytest.raises(ConnectionClosedError):
        ours.receive(0.01)
    assert ours.is_open
    theirs.send({})
    assert ours.is_open and ours.receive(1) == {}
    theirs.close()
    assert not ours.is_open
    ours.close()
    assert not ours.is_open


def test_bytes_that_arrive_with_a_message_count(pair):
    ours, theirs, socket_ = pair
    messages = [ours._codec.encode({"bytes": 10}), b"0123456789", ours._codec.encode({"next": 1})]
    socket_.sendall(b"".join(messages))
    assert theirs.receive(1) == {"bytes": 10}
    theirs.receive_bytes(10, 1)
    assert theirs.receive(1) == {"next": 1}


def test_rate_is_that_of_the_second_half(pair):
    """A burst that the network buffers is not its bandwidth."""
    ours, theirs, socket_ = pair

    def send():
        ours.send_bytes(600_000, LIMIT_SECONDS)
        while _unread_bytes(socket_):  # the second half begins before the pause
            time.sleep(0.001)
        time.sleep(0.3)
        ours.send_bytes(400_000, LIMIT_SECONDS)

    sender = threading.Thread(target=send)
    sender.start()
    rate = theirs.receive_bytes(1_000_000, LIMIT_SECONDS)
    sender.join()
    assert rate < 600_000 / 0.3
