"""What a supervisor tells the coordinator by itself, over a connection of which the test holds the other end."""

import socket

import pytest

from tfdist.launch.failure import WorkerEnd
from tfdist.launch.nodes.link import Link
from tfdist.launch.nodes.member import End, Membership
from tfdist.launch.nodes.outcomes import decode, encode
from tfdist.launch.outcome import Outcome


@pytest.fixture
def ends():
    """A membership that was taken in, and the coordinator's link."""
    near, far = socket.socketpair()
    link = Link(near, send_key=b"joiner", receive_key=b"coordinator")
    coordinator = Link(far, send_key=b"coordinator", receive_key=b"joiner")
    membership = Membership(link, "127.0.0.1", say=lambda *lines: None, write=lambda entry: "")
    coordinator.send({"type": "joined", "run": "f00d", "beat_seconds": 1000.0, "silence_limit": 0.0})
    membership.join({})
    list(coordinator.receive())
    yield membership, coordinator
    membership.close()
    coordinator.close()


def test_suspicion_is_told_at_once(ends):
    membership, coordinator = ends
    for suspects in (False, False, True, True, False):
        membership.exchange(suspects=suspects)
    beats = [said["suspects"] for said in coordinator.receive()]
    assert beats == [False, True, False]


START = {"type": "start", "attempt": 0, "workers": ["a:1"], "all_workers": 1, "first_rank": 0, "may_restart": True}


def test_order_right_behind_the_start_is_heeded(ends):
    membership, coordinator = ends
    coordinator.send(START)
    coordinator.send({"type": "end", "attempt": 0, "reason": "why", "signal": None, "kill": False})
    membership.exchange()
    start = membership.wait_for_start(signals=None)
    assert (start.attempt, membership.order.reason) == (0, "why")


def test_next_start_right_behind_the_settlement_is_not_lost(ends):
    membership, coordinator = ends
    coordinator.send(START)
    membership.exchange()
    membership.wait_for_start(signals=None)
    coordinator.send({"type": "settled", "lines": [], "entry": None})
    coordinator.send({**START, "attempt": 1})
    signals = Signals()
    membership.finish(Outcome(0, 1, ()), signals)
    signals.close()
    assert membership.wait_for_start(signals=None).attempt == 1


def test_end_that_comes_with_the_close_is_no_loss(ends):
    membership, coordinator = ends
    coordinator.send({"type": "over", "code": 3, "lines": [], "entry": None})
    coordinator.close()
    membership.exchange()
    membership.exchange()
    assert membership.wait_for_start(signals=None) == End(3)


class Signals:
    """None came."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        self.fd, self.received = self._ends[0].fileno(), []

    def clear_wakeup(self) -> None:
        pass

    def close(self) -> None:
        for end in self._ends:
            end.close()


def test_outcomes_pass_whole():
    ends = (WorkerEnd(1, -9, ("one", "two"), verdict="frozen", at=1.5), WorkerEnd(2, 1, was_told=True))
    outcome = Outcome(
        0,
        2,
        ends,
        stall="stands",
        unstarted=(3, OSError("no room")),
        heard=frozenset({1}),
        fit=2,
        step=4,
        errors={1: {"a": "b"}},
    )
    back = decode(encode(outcome), "h")
    assert [(end.rank, end.returncode, end.last_lines, end.host) for end in back.ends] == [
        (1, -9, ("one", "two"), "h"),
        (2, 1, (), "h"),
    ]
    assert (back.ends[0].verdict, back.ends[0].at, back.ends[1].was_told) == ("frozen", 1.5, True)
    assert (back.stall, back.heard, back.errors) == ("stands", {1}, {1: {"a": "b"}})
    assert (back.fit, back.step, back.saved) == (2, 4, None)
    assert (back.unstarted[0], str(back.unstarted[1])) == (3, "no room")


def test_long_outcomes_are_cut():
    """So that they are no longer than a message may be."""
    ends = tuple(WorkerEnd(rank, 1, ("x" * 10_000,) * 200) for rank in range(100))
    assert len(str(encode(Outcome(0, 100, ends)))) < 2 * 2**20
