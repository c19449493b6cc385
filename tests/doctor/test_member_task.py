"""What a task answers: strangers get nothing, and no peer can make it store or send without limit."""

import contextlib
import dataclasses
import json
import socket
import time

import pytest

from tfdist.doctor import member_task
from tfdist.doctor.link_measurement import LinkMeasurement
from tfdist.doctor.member_task import MemberTask
from tfdist.doctor.peer_connections import TaskInfo, doctor_credentials
from tfdist.doctor.report import Finding
from tfdist.transport.authenticated_messages import FrameBuffer, encode_frame
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.handshake import Hello
from tfdist.transport.transport_errors import ConnectionClosedError, FrameError, TransportError

LIMIT_SECONDS = 60


class Worker:
    """Worker 1 of two, and ways to connect to it."""

    def __init__(self, cluster, stack):
        context = cluster.context("worker 1")
        server = socket.create_server(("127.0.0.1", cluster.port("worker 1")))
        self._address, self._stack = server.getsockname(), stack
        self.credentials = doctor_credentials(context.config.cluster)
        stack.callback(MemberTask(context, context.config, server, clock=time.time).close)

    def stranger(self, data=b"") -> socket.socket:
        connection = self._stack.enter_context(socket.create_connection(self._address, timeout=LIMIT_SECONDS))
        connection.sendall(data)
        return connection

    def dial(self, task) -> BlockingConnection:
        """Connects as a task of the cluster."""
        connection = BlockingConnection.connect(self.stranger(), self.credentials, timeout_seconds=LIMIT_SECONDS)
        self._stack.callback(connection.close)
        TaskInfo(task, "here", {}).exchange(connection, LIMIT_SECONDS)
        return connection


@pytest.fixture
def worker(tasks):
    with contextlib.ExitStack() as stack:
        yield Worker(tasks(), stack)


def ask(connection, **request):
    return connection.request(timeout_seconds=LIMIT_SECONDS, **request)


def read_all(connection) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            data += part
    return data


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", encode_frame(b""), encode_frame(b"{}"), encode_frame(b"[" * 1000), b"x" * 10_000]
    + [encode_frame(b'{"service": "tfdist doctor", "protocol": 2}'), encode_frame(b'{"do": "echo"}')],
)
def test_strangers_learn_nothing(worker, data):
    assert read_all(worker.stranger(data)) == b""
    assert "clock" in ask(worker.dial("worker 0"), do="echo")  # the server still answers others


def hello(worker, **changed):
    return encode_frame(json.dumps({**vars(Hello.of(worker.credentials, is_client=True)), **changed}).encode())


def test_other_protocol_learns_the_version(worker):
    buffer = FrameBuffer(max_bytes=1024)
    buffer.feed(read_all(worker.stranger(hello(worker, protocol=1))))
    answer = Hello.decode(buffer.next())
    assert (answer.protocol, answer.cluster, buffer.next()) == (2, "", None)


def test_proof_cannot_be_guessed_or_reflected(worker):
    stranger = worker.stranger(hello(worker))
    buffer = FrameBuffer(max_bytes=1024)
    while (answer := buffer.next()) is None:
        buffer.feed(stranger.recv(4096))
    stranger.sendall(encode_frame(json.dumps({"proof": json.loads(answer)["nonce"]}).encode()))
    assert b"refused" in read_all(stranger)


def test_number_of_strangers_is_limited(worker, monkeypatch):
    """Connections beyond the limit are closed at once; there is room again when others leave."""
    monkeypatch.setattr(member_task, "_HANDSHAKE_SECONDS", 1000)
    strangers = [worker.stranger() for _ in range(80)]
    room = member_task._MAX_STRANGERS + 2
    wait_until(lambda: sum(map(is_open, strangers)) == room)
    with pytest.raises((TransportError, OSError)):
        worker.dial("worker 0")
    for stranger in strangers:
        stranger.close()

    def is_accepted():
        with contextlib.suppress(TransportError, OSError):
            return "clock" in ask(worker.dial("worker 0"), do="echo")

    wait_until(is_accepted)


def is_open(connection):
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_only_the_chief_may_use_the_handlers(worker):
    member = worker.dial("worker 1")
    for request in ({"do": "state"}, {"do": "measure", "peer": "worker 0"}, {"do": "unknown"}, {}):
        with pytest.raises(ConnectionClosedError, match="worker 1 may not ask for this"):
            ask(member, **request)
    assert ask(worker.dial("worker 0"), do="state") == {"checked": False, "dialed": False}


def test_transfers_have_a_limit(worker):
    for what in ("send", "receive"):
        for count in (-1, 0, 2**28 + 1, "5", None, 1.5):
            connection = worker.dial("worker 0")
            connection.send({"do": what, "bytes": count})
            with pytest.raises(ConnectionClosedError, match="closed the connection|broke"):
                connection.receive(5)


def test_markers_are_names_of_markers(worker):
    assert ask(worker.dial("worker 0"), do="see_marker", name="../../etc/passwd") == {"seen": None}  # no directory


def test_messages_of_peers_are_checked():
    good = dataclasses.asdict(Finding("error", "x", "found"))
    assert Finding.from_json(json.loads(json.dumps(good))) == Finding("error", "x", "found")
    assert Finding.from_json({**good, "found": "\x1b[31m" + "y" * 10_000}).found.startswith("[31myyy")
    assert len(Finding.from_json({**good, "found": "y" * 10_000}).found) < 5000
    for bad in (None, [], {}, {**good, "level": "fatal"}):
        with pytest.raises(ValueError, match="not a finding"):
            Finding.from_json(bad)
    link = dataclasses.asdict(LinkMeasurement("a", "b", 1.0, 0.0, 0.5))
    assert LinkMeasurement.from_json(link) == LinkMeasurement("a", "b", 1.0, 0.0, 0.5)
    for name, value in (
        ("first", 1),
        ("round_trip_seconds", "1"),
        ("round_trip_seconds", None),
        ("round_trip_seconds", float("nan")),
    ):
        with pytest.raises(ValueError, match="not a measurement"):
            LinkMeasurement.from_json({**link, name: value})
    for bad in (None, {}, {"task": 1, "versions": {}}, {"task": "a", "versions": {str(i): "" for i in range(17)}}):
        with pytest.raises(FrameError):
            TaskInfo.from_json(bad)
