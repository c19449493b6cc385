"""What a rendezvous lets in, over real sockets: the side of the tests may say anything."""

import contextlib
import json
import socket
import struct
import threading
import time

import pytest

from tfdist.launch.errors import UsageError
from tfdist.launch.nodes import dial as dialling
from tfdist.launch.nodes import door as doors
from tfdist.launch.nodes.dial import dial
from tfdist.launch.nodes.door import Door
from tfdist.launch.nodes.frames import MAX_GREETING_BYTES, MAX_MESSAGE_BYTES, FrameBuffer, framed
from tfdist.launch.nodes.handshake import PROTOCOL, Greeting, Secrets, encode_proof
from tfdist.launch.nodes.link import Link

TOKEN = "0123456789abcdef"
LIMIT_SECONDS = 20


class Rendezvous:
    """A door that looks whenever a test waits for something."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.said: list[str] = []
        self.links: list[Link] = []
        self.opened: list[socket.socket | Link] = []
        self.door = Door(self.server, TOKEN, self.said.append)
        self.now = 0.0

    def until(self, condition) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < end, f"waited in vain; said: {self.said}"
            self.links += self.door.look(now=self.now)
            time.sleep(0.002)

    def joiner(self, token=TOKEN, timeout_seconds=LIMIT_SECONDS):
        """Dials in a thread, and returns its link or its error."""
        result = []

        def run():
            try:
                link = dial("127.0.0.1", self.port, token, timeout_seconds=timeout_seconds, say=self.said.append)
                result.append(link)
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.until(lambda: not thread.is_alive())
        thread.join()
        self.opened += [joined for joined in result if isinstance(joined, Link)]
        return result[0]

    def visitor(self, data=b"") -> socket.socket:
        visitor = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_SECONDS)
        self.opened.append(visitor)
        visitor.sendall(data)
        return visitor

    def answer(self, visitor: socket.socket) -> bytes:
        """All that the door says until it closes the connection."""
        said = bytearray()
        is_closed = False
        visitor.setblocking(False)

        def read() -> bool:
            nonlocal is_closed
            with contextlib.suppress(BlockingIOError):
                try:
                    data = visitor.recv(65_536)
                except ConnectionResetError:
                    data = b""
                is_closed = not data
                said.extend(data)
            return is_closed

        self.until(read)
        return bytes(said)


@pytest.fixture
def rendezvous():
    made = Rendezvous()
    yield made
    made.door.close()
    for connection in (*made.links, *made.opened):
        connection.close()


def bodies(data):
    buffer = FrameBuffer(max_bytes=MAX_GREETING_BYTES)
    buffer.feed(data)
    return list(iter(buffer.next, None))


def hello(**changed):
    greeting = Greeting.new()
    return greeting, framed(json.dumps(vars(greeting) | changed).encode())


def test_wrong_token(rendezvous):
    error = rendezvous.joiner("0123456789abcdeX")
    assert isinstance(error, UsageError)
    assert str(error).startswith("The token is wrong. Received: a token that the rendezvous at 127.0.0.1:")
    assert rendezvous.said == ["rendezvous: turned 127.0.0.1 away: wrong token"]
    assert not rendezvous.links
    assert isinstance(rendezvous.joiner(), Link), "the right one is let in as before"
    rendezvous.joiner("0123456789abcdeX")
    assert len(rendezvous.said) == 1, "told once"


@pytest.mark.parametrize("changed", [{"version": "9.9.9"}, {"protocol": PROTOCOL + 1}])
def test_other_version_at_the_door(rendezvous, changed):
    _, greeting = hello(**changed)
    answer = bodies(rendezvous.answer(rendezvous.visitor(greeting)))
    assert len(answer) == 1 and Greeting.decode(answer[0]), "its own version and nothing else"
    (line,) = rendezvous.said
    assert "this is tfdist" in line and str(next(iter(changed.values()))) in line


def serve_once(answer):
    """A false rendezvous that answers one connection; returns its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def run():
        with server, server.accept()[0] as connection:
            connection.settimeout(LIMIT_SECONDS)
            with contextlib.suppress(OSError):
                answer(connection)

    threading.Thread(target=run, daemon=True).start()
    return server.getsockname()[1]


def read_frame(connection):
    buffer = FrameBuffer(max_bytes=MAX_MESSAGE_BYTES)
    while (body := buffer.next()) is None:
        data = connection.recv(4096)
        if not data:
            raise OSError
        buffer.feed(data)
    return body


def dial_to(port, timeout_seconds=LIMIT_SECONDS):
    return dial("127.0.0.1", port, TOKEN, timeout_seconds=timeout_seconds, say=lambda text: None)


def test_other_version_of_the_rendezvous():
    with pytest.raises(UsageError, match="different versions of tfdist.*the other side is tfdist 9.9.9"):
        dial_to(serve_once(lambda connection: connection.sendall(hello(version="9.9.9")[1])))


def test_rendezvous_that_does_not_know_the_token():
    def answer(connection):
        own = Greeting.new()
        theirs = Greeting.decode(read_frame(connection))
        connection.sendall(framed(own.encode()))
        read_frame(connection)
        secrets = Secrets.derive("another token....", joiner=theirs, coordinator=own)
        connection.sendall(framed(encode_proof(secrets.coordinator_proof)))

    with pytest.raises(UsageError, match="does not know the token"):
        dial_to(serve_once(answer))


def test_rendezvous_that_reflects():
    """Greeting and proof of the joiner, sent back to it, prove nothing."""

    def answer(connection):
        for _ in range(2):
            connection.sendall(framed(read_frame(connection)))

    with pytest.raises(UsageError, match="does not know the token"):
        dial_to(serve_once(answer))


def test_silent_rendezvous(monkeypatch):
    monkeypatch.setattr(dialling, "_TRY_SECONDS", 0.2)
    is_over = threading.Event()
    with pytest.raises(UsageError, match="did not answer. Received: the handshake took too long|timed out"):
        dial_to(serve_once(lambda connection: is_over.wait(LIMIT_SECONDS)), timeout_seconds=0.5)
    is_over.set()


def test_rendezvous_that_trickles(monkeypatch):
    """A byte now and then does not make the time longer."""
    monkeypatch.setattr(dialling, "_TRY_SECONDS", 0.4)
    is_over = threading.Event()

    def answer(connection):
        for byte in hello()[1]:
            connection.sendall(bytes([byte]))
            if is_over.wait(0.1):
                return

    with pytest.raises(UsageError, match="did not answer"):
        dial_to(serve_once(answer), timeout_seconds=0.5)
    is_over.set()


def test_joiner_waits_for_a_rendezvous_that_is_not_up_yet(rendezvous):
    with pytest.raises(UsageError, match=r"did not answer. Received: .* for 0.3 s. Expected: tfdist run --node-rank 0"):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        dial_to(port, timeout_seconds=0.3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "a message of 1195725856 bytes, more than 1024"),
        (b"\x00" * 100, "no JSON"),
        (struct.pack("!I", MAX_GREETING_BYTES + 1), "a message of 1025 bytes"),
        (framed(b"[]"), "no JSON object"),
        (framed(b"[" * 1000), "no JSON"),
        (framed(b"{}"), "no greeting"),
        (framed(b'{"protocol": true, "version": "0.1.0", "nonce": "a"}'), "no greeting"),
        (framed(b'{"protocol": 1, "version": "0.1.0", "nonce": "a"}'), "no greeting"),
        (hello(version="1\n2")[1], "no greeting"),
        (hello()[1] + framed(b"{}"), "no proof"),
        (hello()[1] + framed(b'{"proof": "00"}'), "wrong token"),
        (hello()[1] + framed('{"proof": "ä"}'.encode()), "wrong token"),
    ],
)
def test_nonsense_is_turned_away(rendezvous, data, reason):
    rendezvous.answer(rendezvous.visitor(data))
    assert len(rendezvous.said) == 1 and reason in rendezvous.said[0]
    assert not rendezvous.links
    assert isinstance(rendezvous.joiner(), Link)


def test_visitor_that_leaves_in_the_middle(rendezvous):
    visitor = rendezvous.visitor(hello()[1][:20])
    visitor.shutdown(socket.SHUT_WR)
    rendezvous.answer(visitor)
    assert "it has left before it proved the token" in rendezvous.said[0]


def test_silent_visitor_is_turned_away_in_time(rendezvous):
    visitor = rendezvous.visitor(hello()[1][:20])
    rendezvous.until(lambda: len(rendezvous.door.descriptors) == 2)
    rendezvous.now = doors.HANDSHAKE_SECONDS - 0.01
    rendezvous.links += rendezvous.door.look(now=rendezvous.now)
    assert len(rendezvous.door.descriptors) == 2
    rendezvous.now = doors.HANDSHAKE_SECONDS
    rendezvous.answer(visitor)
    assert "no proof of the token in time" in rendezvous.said[0]


def test_slow_visitor_has_no_more_time_than_a_silent_one(rendezvous):
    visitor = rendezvous.visitor()
    rendezvous.until(lambda: len(rendezvous.door.descriptors) == 2)
    for byte in hello()[1][:20]:
        with contextlib.suppress(OSError):  # it is turned away in the midst
            visitor.sendall(bytes([byte]))
        rendezvous.now += 1.0
        rendezvous.links += rendezvous.door.look(now=rendezvous.now)
    rendezvous.answer(visitor)
    assert "no proof of the token in time" in rendezvous.said[0]


def test_many_visitors_leave_room_for_others(rendezvous):
    """One address holds no more than its share, and nobody holds a place for longer than a handshake."""
    for _ in range(3 * doors.MAX_VISITORS_OF_AN_ADDRESS):
        rendezvous.visitor()
    rendezvous.until(lambda: len(rendezvous.said) == 1)
    assert "too many connections that have not proved the token" in rendezvous.said[0]
    for _ in range(10):
        rendezvous.door.look(now=0.0)
    assert len(rendezvous.door.descriptors) == 1 + doors.MAX_VISITORS_OF_AN_ADDRESS
    rendezvous.now = doors.HANDSHAKE_SECONDS
    assert isinstance(rendezvous.joiner(), Link)


def test_more_visitors_than_all_addresses_may_have(rendezvous, monkeypatch):
    monkeypatch.setattr(doors, "MAX_VISITORS", 5)
    for _ in range(8):
        rendezvous.visitor()
    rendezvous.until(lambda: bool(rendezvous.said))
    for _ in range(10):
        rendezvous.door.look(now=0.0)
    assert len(rendezvous.door.descriptors) == 1 + 5
