"""Which connections a listener accepts, over real sockets: the peers of the tests may send anything."""

import contextlib
import dataclasses
import json
import select
import socket
import struct
import threading
import time

import pytest

from tfdist.transport import nonblocking_connection as listeners
from tfdist.transport.authenticated_messages import MAX_HANDSHAKE_BYTES, FrameBuffer, encode_frame
from tfdist.transport.handshake import ClientHandshake, Credentials, Hello
from tfdist.transport.nonblocking_connection import Listener, NonblockingConnection, dial
from tfdist.transport.transport_errors import TokenRejectedError

OURS = Credentials("tfdist test", 1, "0123456789abcdef", same_version=True)
OTHER_TOKEN = dataclasses.replace(OURS, token="0123456789abcdeX")
LIMIT_SECONDS = 60


class Server:
    """A listener that accepts whenever a test waits for something."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.said: list[str] = []
        self.accepted: list[NonblockingConnection] = []
        self.opened: list[socket.socket | NonblockingConnection] = []
        self.listener = Listener(self.socket, OURS, self.said.append)
        self.now = 0.0

    @property
    def pending(self) -> int:
        return len(self.listener.descriptors) - 1

    def accept(self) -> None:
        self.accepted += self.listener.accept(now=self.now)

    def until(self, condition) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < end, f"waited too long; said: {self.said}"
            self.accept()
            time.sleep(0.002)

    def dial(self, credentials=OURS):
        """Dials in a thread, and returns the connection or the error."""
        result = []

        def run():
            try:
                options = {"timeout_seconds": LIMIT_SECONDS, "on_wait": self.said.append}
                result.append(dial("127.0.0.1", self.port, credentials, **options))
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.until(lambda: not thread.is_alive())
        thread.join()
        self.opened += [joined for joined in result if isinstance(joined, NonblockingConnection)]
        return result[0]

    def stranger(self, data=b"") -> socket.socket:
        stranger = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_SECONDS)
        self.opened.append(stranger)
        stranger.sendall(data)
        return stranger

    def answer(self, stranger: socket.socket) -> bytes:
        """Everything that the listener sends until it closes the connection."""
        answer = bytearray()
        is_closed = False
        stranger.setblocking(False)

        def read() -> bool:
            nonlocal is_closed
            with contextlib.suppress(BlockingIOError):
                try:
                    data = stranger.recv(65_536)
                except ConnectionResetError:
                    data = b""
                is_closed = not data
                answer.extend(data)
            return is_closed

        self.until(read)
        return bytes(answer)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.listener.close()
    for connection in (*made.accepted, *made.opened):
        connection.close()


def bodies(data):
    buffer = FrameBuffer(max_bytes=MAX_HANDSHAKE_BYTES)
    buffer.feed(data)
    return list(iter(buffer.next, None))


def hello(**changed):
    return encode_frame(dataclasses.replace(Hello.of(OURS, is_client=True), **changed).encode())


def test_wrong_token(server):
    assert isinstance(server.dial(OTHER_TOKEN), TokenRejectedError)
    assert server.said == ["refused a connection from 127.0.0.1: wrong token"]
    assert not server.accepted
    assert isinstance(server.dial(), NonblockingConnection), "the right token is accepted afterwards"
    server.dial(OTHER_TOKEN)
    assert len(server.said) == 1, "said once"


@pytest.mark.parametrize("changed", [{"version": "9.9.9"}, {"protocol": 2}])
def test_other_version(server, changed):
    answer = bodies(server.answer(server.stranger(hello(**changed))))
    assert len(answer) == 1 and Hello.decode(answer[0]), "the server's version and nothing else"
    (line,) = server.said
    assert "this is tfdist" in line and str(next(iter(changed.values()))) in line


def test_another_service_learns_nothing(server):
    assert server.answer(server.stranger(hello(service="tfdist other"))) == b""


NONCE = "0" * 64


def raw(**fields):
    """A hello with fields of any kind."""
    return encode_frame(json.dumps({**vars(Hello.of(OURS, is_client=True)), **fields}).encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "a message of 1195725856 bytes exceeds the limit of 1024"),
        (b"\x00" * 100, "not a JSON object"),
        (struct.pack("!I", MAX_HANDSHAKE_BYTES + 1), "a message of 1025 bytes"),
        (encode_frame(b"[]"), "not a JSON object"),
        (encode_frame(b"[" * 1000), "not a JSON object"),
        (encode_frame(b"{}"), "not a hello"),
        (raw(protocol=True), "not a hello"),
        (raw(nonce="a"), "not a hello"),
        (raw(nonce="\ud800" * 64), "not a hello"),
        (raw(version="1\n2"), "not a hello"),
        (raw(version="1" * 41), "not a hello"),
        (raw(service="\x1b[2J"), "not a hello"),
        (raw(cluster=7), "not a hello"),
        (raw(cluster=NONCE), "wrong cluster"),
        (hello() + encode_frame(b"{}"), "not a proof"),
        (hello() + encode_frame(b'{"proof": "00"}'), "wrong token"),
        (hello() + encode_frame('{"proof": "ä"}'.encode()), "wrong token"),
        (hello() + encode_frame(b'{"proof": "\\ud800"}'), "wrong token"),
    ],
)
def test_malformed_messages_are_refused(server, data, reason):
    server.answer(server.stranger(data))
    assert len(server.said) == 1 and reason in server.said[0]
    assert not server.accepted
    assert isinstance(server.dial(), NonblockingConnection)


def test_data_behind_the_proof_is_refused(server):
    """A client waits for the server's proof; earlier messages would not be authenticated by it."""
    client = ClientHandshake(OURS)
    stranger = server.stranger(encode_frame(client.hello))
    server.until(lambda: select.select([stranger], [], [], 0)[0])
    (answer,) = bodies(stranger.recv(4096))
    stranger.sendall(encode_frame(client.prove(answer)) + encode_frame(b"{}"))
    server.answer(stranger)
    assert "unexpected data behind the handshake" in server.said[0] and not server.accepted


def test_stranger_that_leaves_during_the_handshake(server):
    stranger = server.stranger(hello()[:20])
    stranger.shutdown(socket.SHUT_WR)
    server.answer(stranger)
    assert "it closed the connection before it proved the token" in server.said[0]


def test_silent_stranger_is_refused_in_time(server):
    stranger = server.stranger(hello()[:20])
    server.until(lambda: server.pending == 1)
    server.now = listeners.HANDSHAKE_SECONDS - 0.01
    server.accept()
    assert server.pending == 1
    server.now = listeners.HANDSHAKE_SECONDS
    server.answer(stranger)
    assert "no proof of the token in time" in server.said[0]


def test_slow_stranger_has_no_more_time_than_a_silent_one(server):
    stranger = server.stranger()
    server.until(lambda: server.pending == 1)
    for byte in hello()[:20]:
        with contextlib.suppress(OSError):  # it is refused before the last byte
            stranger.sendall(bytes([byte]))
        server.now += 1.0
        server.accept()
    server.answer(stranger)
    assert "no proof of the token in time" in server.said[0]


def test_many_strangers_leave_room_for_others(server):
    """One address has no more than its share of pending connections, each no longer than a handshake may take."""
    for _ in range(3 * listeners.MAX_PENDING_PER_ADDRESS):
        server.stranger()
    server.until(lambda: len(server.said) == 1)
    assert "too many connections without a proof of the token" in server.said[0]
    for _ in range(10):
        server.accept()
    assert server.pending == listeners.MAX_PENDING_PER_ADDRESS
    server.now = listeners.HANDSHAKE_SECONDS
    assert isinstance(server.dial(), NonblockingConnection)


def test_limit_for_all_addresses(server, monkeypatch):
    monkeypatch.setattr(listeners, "MAX_PENDING", 5)
    for _ in range(8):
        server.stranger()
    server.until(lambda: bool(server.said))
    for _ in range(10):
        server.accept()
    assert server.pending == 5
