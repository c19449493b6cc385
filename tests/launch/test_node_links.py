"""Messages behind the handshake: what one side sends and the other takes, with a test in between."""

import socket
import struct
import time

import pytest

from tfdist.launch.nodes.frames import MAX_MESSAGE_BYTES, FrameBuffer, FrameError, framed
from tfdist.launch.nodes.handshake import Greeting, Secrets
from tfdist.launch.nodes.link import Link, LinkClosed

LIMIT_SECONDS = 20


@pytest.fixture
def pair():
    """A joiner's link and the coordinator's."""
    near, far = socket.socketpair()
    links = (
        Link(near, send_key=b"joiner", receive_key=b"coordinator"),
        Link(far, send_key=b"coordinator", receive_key=b"joiner"),
    )
    yield links
    for link in links:
        link.close()


def received(link, number=1):
    """The next messages of a link."""
    found = []
    end = time.monotonic() + LIMIT_SECONDS
    while len(found) < number:
        assert time.monotonic() < end
        found.extend(link.receive())
    return found


def closing(link):
    """Why a link ends."""
    with pytest.raises(LinkClosed) as closed:
        received(link, 10**9)
    return str(closed.value)


def test_messages_pass_in_both_directions(pair):
    joiner, coordinator = pair
    for number in range(3):
        joiner.send({"from": "joiner", "number": number})
        coordinator.send({"from": "coordinator", "number": number})
    assert received(coordinator, 3) == [{"from": "joiner", "number": number} for number in range(3)]
    assert received(joiner, 3) == [{"from": "coordinator", "number": number} for number in range(3)]


def test_long_messages_wait_until_they_are_read(pair):
    joiner, coordinator = pair
    text = "x" * (MAX_MESSAGE_BYTES - 100)
    joiner.send({"text": text})
    assert joiner.has_unsent
    found = []
    while not found:
        joiner.flush()
        found = list(coordinator.receive())
    assert found == [{"text": text}]


def test_who_does_not_read_is_given_up(pair):
    joiner, _ = pair
    with pytest.raises(LinkClosed, match="does not read"):
        for _ in range(20):
            joiner.send({"text": "x" * (MAX_MESSAGE_BYTES - 100)})


def test_too_long_a_message_is_not_sent(pair):
    with pytest.raises(ValueError, match="too long"):
        pair[0].send({"text": "x" * MAX_MESSAGE_BYTES})


def test_last_messages_come_before_the_end(pair):
    joiner, coordinator = pair
    joiner.send({"last": True})
    joiner.close()
    found = []
    with pytest.raises(LinkClosed, match="closed"):
        while True:
            found.extend(coordinator.receive())
    assert found == [{"last": True}]


class Wire:
    """Between a joiner and a coordinator: what one sends is recorded, and the test passes on what it likes."""

    def __init__(self) -> None:
        keys = {"send_key": b"joiner", "receive_key": b"coordinator"}
        near, self._joiner_end = socket.socketpair()
        self._coordinator_end, far = socket.socketpair()
        self.joiner = Link(near, **keys)
        self.coordinator = Link(far, send_key=b"coordinator", receive_key=b"joiner")
        self.ends = (self.joiner, self.coordinator, self._joiner_end, self._coordinator_end)

    def sent(self, message):
        self.joiner.send(message)
        return self._joiner_end.recv(65_536)

    def deliver(self, data):
        self._coordinator_end.sendall(data)

    def deliver_back(self, data):
        self._joiner_end.sendall(data)


@pytest.fixture
def wire():
    made = Wire()
    yield made
    for end in made.ends:
        end.close()


def test_wire_passes_what_it_is_given(wire):
    wire.deliver(wire.sent({"number": 1}) + wire.sent({"number": 2}))
    assert received(wire.coordinator, 2) == [{"number": 1}, {"number": 2}]


@pytest.mark.parametrize("attack", ["replayed", "left out", "swapped", "changed", "shortened", "of another connection"])
def test_no_message_is_taken_that_was_not_sent_so(wire, attack):
    first, second = wire.sent({"number": 1}), wire.sent({"number": 2})
    if attack == "replayed":
        wire.deliver(first)
        assert received(wire.coordinator) == [{"number": 1}]
        wire.deliver(first)
    elif attack == "left out":
        wire.deliver(second)
    elif attack == "swapped":
        wire.deliver(second + first)
    elif attack == "changed":
        wire.deliver(first.replace(b"1}", b"7}"))
    elif attack == "shortened":
        wire.deliver(framed(first[4:-1]))
    else:
        near, end = socket.socketpair()
        with near, end:
            Link(near, send_key=b"another joiner", receive_key=b"coordinator").send({"number": 1})
            wire.deliver(end.recv(65_536))
    assert closing(wire.coordinator) == "it sent a message that is not authentic"


def test_own_messages_are_not_taken_back(wire):
    """The two directions have keys of their own."""
    wire.deliver_back(wire.sent({"number": 1}))
    assert closing(wire.joiner) == "it sent a message that is not authentic"


def test_oversized_message_is_refused_before_it_arrives(wire):
    wire.deliver(struct.pack("!I", 2**31))
    assert "a message of 2147483648 bytes" in closing(wire.coordinator)


@pytest.mark.parametrize("body", [b"", b"no mac", b"x" * 32])
def test_garbage_behind_the_handshake(wire, body):
    wire.deliver(framed(body))
    assert closing(wire.coordinator) == "it sent a message that is not authentic"


def test_proofs_and_keys_all_differ_and_depend_on_everything():
    one, two = Greeting.new(), Greeting.new()
    made = [
        Secrets.derive(token, joiner=joiner, coordinator=coordinator)
        for token in ("0123456789abcdef", "another token....")
        for joiner, coordinator in ((one, two), (two, one), (one, one))
    ]
    values = [value for secrets in made for value in vars(secrets).values()]
    assert len(set(values)) == len(values) == 24


def test_truncated_message_is_no_message():
    buffer = FrameBuffer(max_bytes=10)
    for byte in framed(b"12345")[:-1]:
        buffer.feed(bytes([byte]))
        assert buffer.next() is None
    buffer.feed(b"5")
    assert buffer.next() == b"12345"


def test_length_alone_is_refused():
    buffer = FrameBuffer(max_bytes=10)
    buffer.feed(framed(b"x" * 11)[:4])
    with pytest.raises(FrameError, match="a message of 11 bytes, more than 10"):
        buffer.next()
