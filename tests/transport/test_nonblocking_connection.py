"""Authenticated messages over a non-blocking connection, and attacks on them."""

import socket
import struct
import time

import pytest

from tfdist.transport.authenticated_messages import MAX_MESSAGE_BYTES, FrameBuffer, encode_frame
from tfdist.transport.handshake import SessionKeys
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError, FrameError

LIMIT_SECONDS = 60
CLIENT, SERVER = SessionKeys(b"client", b"server"), SessionKeys(b"server", b"client")
NOT_AUTHENTIC = "the message is not authentic"


@pytest.fixture
def pair():
    """A client's connection and the server's."""
    near, far = socket.socketpair()
    connections = NonblockingConnection(near, CLIENT), NonblockingConnection(far, SERVER)
    yield connections
    for connection in connections:
        connection.close()


def received(connection, number=1):
    """The next messages of a connection."""
    found = []
    end = time.monotonic() + LIMIT_SECONDS
    while len(found) < number:
        assert time.monotonic() < end
        found.extend(connection.receive())
    return found


def closing(connection):
    """Why a connection ends."""
    with pytest.raises(ConnectionClosedError) as closed:
        received(connection, 10**9)
    return str(closed.value)


def test_messages_pass_in_both_directions(pair):
    client, server = pair
    for number in range(3):
        client.send({"from": "client", "number": number})
        server.send({"from": "server", "number": number})
    assert received(server, 3) == [{"from": "client", "number": number} for number in range(3)]
    assert received(client, 3) == [{"from": "server", "number": number} for number in range(3)]


def test_long_messages_wait_until_they_are_read(pair):
    client, server = pair
    text = "x" * (MAX_MESSAGE_BYTES - 100)
    client.send({"text": text})
    assert client.has_unsent
    found = []
    while not found:
        client.flush()
        found = list(server.receive())
    assert found == [{"text": text}]


def test_peer_that_does_not_read(pair):
    client, _ = pair
    with pytest.raises(ConnectionClosedError, match="does not read"):
        for _ in range(20):
            client.send({"text": "x" * (MAX_MESSAGE_BYTES - 100)})


def test_too_long_a_message_is_not_sent(pair):
    with pytest.raises(ValueError, match="too long"):
        pair[0].send({"text": "x" * MAX_MESSAGE_BYTES})


def test_last_messages_arrive_before_the_end(pair):
    client, server = pair
    client.send({"last": True})
    client.close()
    found = []
    with pytest.raises(ConnectionClosedError, match="closed"):
        while True:
            found.extend(server.receive())
    assert found == [{"last": True}]


class Wire:
    """Between a client and a server: the test reads what one sends and decides what the other receives."""

    def __init__(self) -> None:
        near, self._client_end = socket.socketpair()
        self._server_end, far = socket.socketpair()
        self.client, self.server = NonblockingConnection(near, CLIENT), NonblockingConnection(far, SERVER)
        self.ends = (self.client, self.server, self._client_end, self._server_end)

    def sent(self, message):
        self.client.send(message)
        return self._client_end.recv(65_536)

    def deliver(self, data):
        self._server_end.sendall(data)

    def deliver_back(self, data):
        self._client_end.sendall(data)


@pytest.fixture
def wire():
    made = Wire()
    yield made
    for end in made.ends:
        end.close()


def test_wire_passes_messages(wire):
    wire.deliver(wire.sent({"number": 1}) + wire.sent({"number": 2}))
    assert received(wire.server, 2) == [{"number": 1}, {"number": 2}]


@pytest.mark.parametrize("attack", ["replayed", "left out", "swapped", "changed", "shortened", "of another connection"])
def test_manipulated_messages_are_detected(wire, attack):
    first, second = wire.sent({"number": 1}), wire.sent({"number": 2})
    if attack == "replayed":
        wire.deliver(first)
        assert received(wire.server) == [{"number": 1}]
        wire.deliver(first)
    elif attack == "left out":
        wire.deliver(second)
    elif attack == "swapped":
        wire.deliver(second + first)
    elif attack == "changed":
        wire.deliver(first.replace(b"1}", b"7}"))
    elif attack == "shortened":
        wire.deliver(encode_frame(first[4:-1]))
    else:
        near, end = socket.socketpair()
        with near, end:
            NonblockingConnection(near, SessionKeys(b"another client", b"server")).send({"number": 1})
            wire.deliver(end.recv(65_536))
    assert closing(wire.server) == NOT_AUTHENTIC


def test_reflected_messages_are_detected(wire):
    """Each direction has its own key."""
    wire.deliver_back(wire.sent({"number": 1}))
    assert closing(wire.client) == NOT_AUTHENTIC


def test_oversized_message_is_detected_before_it_arrives(wire):
    wire.deliver(struct.pack("!I", 2**31))
    assert "a message of 2147483648 bytes" in closing(wire.server)


@pytest.mark.parametrize("body", [b"", b"no mac", b"x" * 32])
def test_garbage_after_the_handshake(wire, body):
    wire.deliver(encode_frame(body))
    assert closing(wire.server) == NOT_AUTHENTIC


def test_frame_is_complete_with_its_last_byte():
    buffer = FrameBuffer(max_bytes=10)
    for byte in encode_frame(b"12345")[:-1]:
        buffer.feed(bytes([byte]))
        assert buffer.next() is None
    buffer.feed(b"5")
    assert buffer.next() == b"12345"


def test_length_alone_exceeds_the_limit():
    buffer = FrameBuffer(max_bytes=10)
    buffer.feed(encode_frame(b"x" * 11)[:4])
    with pytest.raises(FrameError, match="a message of 11 bytes exceeds the limit of 10"):
        buffer.next()
