"""Messages between a node and the coordinator; the test holds the coordinator's end."""

import os
import socket

import pytest
from replaced_clocks import set_clock

from tfdist.launch.processes.output import Console
from tfdist.launch.processes.run_policy import ShutdownOrder
from tfdist.launch.rendezvous import node_client as module
from tfdist.launch.rendezvous.node_client import NodeClient
from tfdist.launch.restart.attempt_outcome import ErrorFile, Outcome
from tfdist.launch.run_spec import RunSpec
from tfdist.transport.handshake import SessionKeys
from tfdist.transport.nonblocking_connection import NonblockingConnection

JOINED = {"type": "joined", "run": "f00d", "seed": 7, "heartbeat_seconds": 1.0, "heartbeat_timeout": 0.0}


def connected():
    """The connection of a client, and the coordinator's."""
    near, far = socket.socketpair()
    coordinator = NonblockingConnection(far, SessionKeys(b"server", b"client"))
    return NonblockingConnection(near, SessionKeys(b"client", b"server")), coordinator


@pytest.fixture
def ends():
    """A client that has joined, and the coordinator's connection."""
    connection, coordinator = connected()
    null = os.open(os.devnull, os.O_WRONLY)
    console = Console(null, null)
    client = NodeClient(connection, "127.0.0.1", console=console, error_file=ErrorFile(None, None), spec=RunSpec())
    coordinator.send({**JOINED, "heartbeat_seconds": 1000.0})
    client.join({})
    list(coordinator.receive())
    yield client, coordinator
    client.close()
    coordinator.close()
    os.close(null)


def test_suspicion_is_reported_at_once(ends):
    client, coordinator = ends
    for suspects in (False, False, True, True, False):
        client.poll(suspects_freeze=suspects)
    beats = [said["suspects"] for said in coordinator.receive()]
    assert beats == [False, True, False]


SHUT_DOWN = {"type": "shut_down", "attempt": 0, **ShutdownOrder("why").as_message()}
START = {
    "type": "start",
    "run": "f00d",
    "seed": 7,
    "nodes": [[0, [0]]],
    "attempt": 0,
    "addresses": ["a:1"],
    "workers": 1,
    "parameter_servers": 0,
    "has_chief": False,
    "all_workers": 1,
    "ranks": [0],
    "is_elastic": False,
    "joins_late": False,
    "may_restart": True,
}


def test_order_right_behind_the_start(ends):
    client, coordinator = ends
    coordinator.send(START)
    coordinator.send(SHUT_DOWN)
    client.poll()
    start = client.next_attempt(signals=None)
    assert (start.attempt, client.shutdown_order.reason) == (0, "why")


def test_next_start_right_behind_the_end_of_an_attempt(ends):
    client, coordinator = ends
    coordinator.send(START)
    client.poll()
    client.next_attempt(signals=None)
    coordinator.send({"type": "attempt_over", "lines": [], "entry": None})
    coordinator.send({**START, "attempt": 1})
    signals = Signals()
    client.attempt_ended(Outcome(0, 1, ()), signals)
    signals.close()
    assert client.next_attempt(signals=None).attempt == 1


def test_reports_and_orders_belong_to_one_attempt(ends):
    client, coordinator = ends
    coordinator.send(START)
    coordinator.send(SHUT_DOWN)
    client.poll()
    assert client.report_lost_peer("first") and client.report_lost_peer("again"), "the coordinator decides"
    coordinator.send({"type": "attempt_over", "lines": [], "entry": None})
    coordinator.send({**START, "attempt": 1})
    client.poll()
    assert client.shutdown_order is None
    client.report_lost_peer("second")
    reports = [(message["attempt"], message["text"]) for message in coordinator.receive() if "text" in message]
    assert reports == [(0, "first"), (1, "second")]


def test_each_signal_is_reported_once(ends):
    client, coordinator = ends
    for received in ([], [15], [15], [15, 2], [15, 2, 15], [15, 2, 15]):
        client.report_signals(received)
    stops = [(message["signal"], message["again"]) for message in coordinator.receive()]
    assert stops == [(15, False), (2, False), (15, True)]


@pytest.mark.parametrize("message", [{}, {"type": "start", "attempt": 0}, {"type": "prepare", "processes": "many"}])
def test_malformed_message_of_the_coordinator(ends, message):
    client, coordinator = ends
    coordinator.send(message)
    client.poll()
    assert not client.is_connected and client.shutdown_order.reason.startswith("the rendezvous was lost")
    assert client.next_attempt(signals=None) == 69
    assert not client.report_lost_peer("why"), "the attempt decides by itself"


def test_end_of_the_run_right_before_the_close(ends):
    client, coordinator = ends
    coordinator.send({"type": "run_over", "code": 3, "lines": [], "entry": None})
    coordinator.close()
    client.poll()
    client.poll()
    assert client.next_attempt(signals=None) == 3


class ManyCoordinators:
    """In place of a `Reconnection`: connects with the coordinator that the test holds next."""

    def __init__(self) -> None:
        self._near = None

    def advance(self):
        near, self._near = self._near, None
        return near

    def close(self):
        if self._near is not None:
            self._near.close()

    def reject(self, client, reason, *, is_final=False):
        """Lets the client connect, and rejects it; returns whether it asked to join."""
        self._near, far = connected()
        client.poll()
        requests = [message for message in far.receive() if "running" in message]
        far.send({"type": "rejected", "reason": reason, "is_final": is_final})
        client.poll()
        far.close()
        return bool(requests)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A client whose elastic workers train on without the coordinator, its next connections, and what it has said.

    Time passes when the test asks what was said: 1 s, as between two connections.
    """
    clock = set_clock(monkeypatch, module)
    near, coordinator = connected()
    coordinators, output = ManyCoordinators(), tmp_path / "said"
    with output.open("wb") as written:
        console = Console(written.fileno(), written.fileno())
        options = {"console": console, "error_file": ErrorFile(None, None), "reconnection": coordinators}
        client = NodeClient(near, "127.0.0.1", spec=RunSpec(nodes=2, elastic=1), **options)
        coordinator.send(JOINED)
        client.join({})
        coordinator.send({**START, "is_elastic": True})
        client.poll()
        client.next_attempt(signals=None)
        coordinator.close()
        client.poll()

        def said():
            clock.now += 1.0
            return output.read_text()

        yield client, coordinators, said
        client.close()


def test_a_lasting_rejection_is_said_once(alone):
    client, coordinators, said = alone
    for reason in ("Received: --elastic 1. Expected: --elastic 2.", "Received: --nodes 2. Expected: --nodes 3."):
        assert coordinators.reject(client, reason) and reason not in said(), "it may pass"
        for _ in range(8):
            coordinators.reject(client, reason)
            said()
        assert said().count(f"; it asks again. {reason}") == 1


def test_a_node_that_is_rejected_for_good_does_not_ask_again(alone):
    client, coordinators, said = alone
    assert coordinators.reject(client, "They have continued without it", is_final=True)
    assert "They have continued without it" in said() and client.next_attempt(signals=None) == 69
    assert not coordinators.reject(client, "again")


class Signals:
    """No signal arrived."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        self.fd, self.received = self._ends[0].fileno(), []

    def clear_wakeup(self) -> None:
        pass

    def close(self) -> None:
        for end in self._ends:
            end.close()
