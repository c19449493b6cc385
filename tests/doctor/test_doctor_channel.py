"""What a task does for whom: strangers get nothing, and nobody can make it remember or send without limit."""

import contextlib
import json
import socket
import threading
import time

import pytest

from tfdist.doctor import service
from tfdist.doctor.channel import Channel, ChannelError
from tfdist.doctor.finding import Finding
from tfdist.doctor.greeting import OTHER_PROTOCOL, About, Passport, RefusedError
from tfdist.doctor.link import Link
from tfdist.doctor.member import Member


@pytest.fixture
def worker(tasks):
    """Worker 1 of two, and a way to dial it."""
    cluster = tasks()
    situation = cluster.situation("worker 1")
    server = socket.create_server(("127.0.0.1", cluster.port("worker 1")))
    member = Member(situation, situation.config, server, clock=time.time)

    def connect(task=None, token=""):
        channel = Channel(socket.create_connection(server.getsockname(), timeout=10))
        if task is not None:
            passport = Passport(About(task, "here", {}), situation.config.cluster, token)
            try:
                passport.introduce(channel, 10)
            except ChannelError:
                channel.close()
                raise
        return channel

    with contextlib.ExitStack() as stack:
        stack.callback(member.close)

        def open_one(*arguments):
            return stack.enter_context(contextlib.closing(connect(*arguments)))

        open_one.cluster = situation.config.cluster
        yield open_one


def ask(channel, **request):
    return channel.ask(limit_seconds=10, **request)


@pytest.mark.parametrize(
    "says",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"{}\n",
        b"[" * 2000 + b"\n",
        b'{"tfdist doctor": 1}\n',
        b'{"tfdist doctor": 1, "nonce": "short", "cluster": "x"}\n',
        b"x" * 10_000,
        b'{"do": "echo"}\n',
    ],
)
def test_strangers_are_sent_away(worker, says):
    stranger = worker()
    stranger._send(says, 10)
    with pytest.raises(ChannelError, match="closed the connection|broke"):
        stranger.receive(10)
    assert "clock" in ask(worker("worker 0"), do="echo")  # and it goes on


def test_another_protocol_is_told_so(worker):
    stranger = worker()
    stranger.send({"tfdist doctor": 2, "nonce": "0" * 32, "cluster": "x"})
    assert stranger.receive(10) == {"refused": OTHER_PROTOCOL}


def test_a_proof_cannot_be_sent_back(worker):
    """Who knows no token has only what the other side has sent."""
    stranger = worker()
    stranger.send(Passport(About("worker 0", "", {}), worker.cluster)._opening("0" * 32))
    answer = stranger.receive(10)
    stranger.send({"proof": answer["proof"], "about": {"task": "worker 0", "host": "", "versions": {}}})
    assert "refused" in stranger.receive(10)


def test_strangers_are_limited(worker, monkeypatch):
    """Those beyond the limit are sent away at once; when others leave there is room again."""
    monkeypatch.setattr(service, "_GREET_SECONDS", 1000)
    strangers = [worker() for _ in range(80)]
    room = service._STRANGERS + 2
    wait_until(lambda: sum(stranger.is_open for stranger in strangers) == room)
    with pytest.raises(ChannelError):
        worker("worker 0")
    for stranger in strangers:
        stranger.close()

    def is_let_in():
        with contextlib.suppress(ChannelError):
            return "clock" in ask(worker("worker 0"), do="echo")

    wait_until(is_let_in)


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("request_", [{"do": "state"}, {"do": "measure", "peer": "worker 0"}, {"do": "unheard"}, {}])
def test_only_the_first_task_conducts(worker, request_):
    with pytest.raises(ChannelError, match="not for worker 1 to ask"):
        ask(worker("worker 1"), **request_)
    if request_ == {"do": "state"}:
        assert ask(worker("worker 0"), **request_) == {"checked": False, "dialed": False}


@pytest.mark.parametrize("count", [-1, 0, 2**28 + 1, "5", None, 1.5])
@pytest.mark.parametrize("what", ["send", "take"])
def test_transfers_have_a_limit(worker, what, count):
    channel = worker("worker 0")
    channel.send({"do": what, "bytes": count})
    with pytest.raises(ChannelError, match="closed the connection|broke"):
        channel.receive(5)


def test_markers_are_names_of_markers(worker, tmp_path):
    assert ask(worker("worker 0"), do="look", name="../../etc/passwd") == {"seen": None}  # it knows of no directory


@pytest.fixture
def pair():
    """Makes pairs of connected channels."""
    with contextlib.ExitStack() as stack:

        def make():
            return [stack.enter_context(contextlib.closing(Channel(end))) for end in socket.socketpair()]

        yield make


def test_long_lines_and_slow_ones(pair):
    ours, theirs = pair()
    theirs.max_message_bytes = 100
    sender = threading.Thread(target=_flood, args=(ours,), daemon=True)
    sender.start()
    with pytest.raises(ChannelError, match="no message"):
        theirs.receive(10)
    theirs.close()
    sender.join(10)
    ours, theirs = pair()
    theirs.max_message_bytes = 100
    ours.send({"a": "x" * 50})
    ours.send({"a": "x" * 100})
    assert theirs.receive(10) == {"a": "x" * 50}
    with pytest.raises(ChannelError, match="no message"):
        theirs.receive(10)
    ours, theirs = pair()
    ours._send(b'{"do"', 1)
    with pytest.raises(ChannelError, match="does not answer in time"):
        theirs.receive(0.05)


def _flood(channel):
    with contextlib.suppress(ChannelError):
        channel._send(b"x" * 2**22, 10)


def test_whether_a_channel_is_open(pair):
    ours, theirs = pair()
    with pytest.raises(ChannelError):
        ours.receive(0.01)
    assert ours.is_open
    theirs.send({})
    assert ours.is_open and ours.receive(1) == {}
    theirs.close()
    assert not ours.is_open
    ours.close()
    assert not ours.is_open


def test_bytes_that_came_with_a_line_are_counted(pair):
    ours, theirs = pair()
    ours._send(b'{"bytes": 10}\n0123456789{"next": 1}\n', 1)
    assert theirs.receive(1) == {"bytes": 10}
    theirs.receive_bytes(10, 1)
    assert theirs.receive(1) == {"next": 1}


def test_the_rate_is_that_of_the_second_half(pair):
    """A burst that the network takes at once is not its bandwidth."""
    ours, theirs = pair()

    def send():
        ours.send_bytes(600_000, 10)
        time.sleep(0.3)
        ours.send_bytes(400_000, 10)

    sender = threading.Thread(target=send)
    sender.start()
    rate = theirs.receive_bytes(1_000_000, 10)
    sender.join()
    assert rate < 600_000 / 0.3


def test_what_others_say_is_checked():
    good = Finding("error", "x", "found").to_json()
    assert Finding.from_json(json.loads(json.dumps(good))) == Finding("error", "x", "found")
    assert Finding.from_json({**good, "found": "\x1b[31m" + "y" * 10_000}).found.startswith("[31myyy")
    assert len(Finding.from_json({**good, "found": "y" * 10_000}).found) < 5000
    for bad in (None, [], {}, {**good, "level": "fatal"}):
        with pytest.raises(ValueError, match="no finding"):
            Finding.from_json(bad)
    link = Link("a", "b", 1.0, 0.0, 0.5).to_json()
    assert Link.from_json(link) == Link("a", "b", 1.0, 0.0, 0.5)
    for name, value in (
        ("first", 1),
        ("round_trip_seconds", "1"),
        ("round_trip_seconds", None),
        ("round_trip_seconds", float("nan")),
    ):
        with pytest.raises(ValueError, match="no link"):
            Link.from_json({**link, name: value})
    for bad in (None, {}, {"task": 1, "versions": {}}, {"task": "a", "versions": {str(i): "" for i in range(17)}}):
        with pytest.raises(RefusedError):
            About.from_json(bad)
