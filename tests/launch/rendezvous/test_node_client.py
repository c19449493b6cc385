"""Messages between a node and the coordinator; the test holds the coordinator's end."""

import os
import socket

import pytest

from tfdist.launch.processes.output import Console
from tfdist.launch.processes.run_policy import ShutdownOrder
from tfdist.launch.rendezvous.node_client import NodeClient
from tfdist.launch.restart.attempt_outcome import ErrorFile, Outcome
from tfdist.launch.run_spec import RunSpec
from tfdist.transport.handshake import SessionKeys
from tfdist.transport.nonblocking_connection import NonblockingConnection


@pytest.fixture
def ends():
    """A client that has joined, and the coordinator's connection."""
    near, far = socket.socketpair()
    connection = NonblockingConnection(near, SessionKeys(b"client", b"server"))
    coordinator = NonblockingConnection(far, SessionKeys(b"server", b"client"))
    null = os.open(os.devnull, os.O_WRONLY)
    console = Console(null, null)
    client = NodeClient(connection, "127.0.0.1", console=console, error_file=ErrorFile(None, None), spec=RunSpec())
    coordinator.send(
        {"type": "joined", "run": "f00d", "seed": 7, "heartbeat_seconds": 1000.0, "heartbeat_timeout": 0.0}
    )
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
