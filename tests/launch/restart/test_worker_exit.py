import signal

import pytest

from tfdist.launch.restart.worker_exit import WorkerExit, root_cause

TRACEBACK = "Traceback (most recent call last):"
OWN = WorkerExit(0, 1, (TRACEBACK, "  File", "ValueError: mine"))
# As TensorFlow 2.21 puts it when a peer is killed.
LOST_PEER = WorkerExit(
    1,
    1,
    (
        TRACEBACK,
        "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:",
        "Collective ops is aborted by: recvmsg:Connection reset by peer",
    ),
)
KILLED = WorkerExit(2, -9)
SIGNALLED = WorkerExit(3, -15, was_signalled=True)


@pytest.mark.parametrize(
    ("exits", "first"),
    [
        ([], None),
        ([WorkerExit(0, 0)], None),
        ([SIGNALLED], None),
        ([OWN, KILLED], OWN),
        ([KILLED, OWN], KILLED),
        ([LOST_PEER, OWN], OWN),
        ([LOST_PEER, SIGNALLED, KILLED], KILLED),
        ([LOST_PEER, SIGNALLED], LOST_PEER),
        ([LOST_PEER, WorkerExit(2, 1, LOST_PEER.last_lines)], LOST_PEER),
        (
            [LOST_PEER, WorkerExit(3, -15, OWN.last_lines, was_signalled=True)],
            WorkerExit(3, -15, OWN.last_lines, was_signalled=True),
        ),
        ([OWN, WorkerExit(3, -15, OWN.last_lines, was_signalled=True)], OWN),
    ],
)
def test_cause(exits, first):
    assert root_cause(exits) is first or root_cause(exits) == first


@pytest.mark.parametrize(
    ("end", "reports_lost_peer"),
    [
        (OWN, False),
        (LOST_PEER, True),
        (KILLED, False),
        (WorkerExit(0, -9, LOST_PEER.last_lines), False),
        (WorkerExit(0, -6, ("E0000 Failed to send RPC to coordination service. Either the leader",)), True),
        (
            WorkerExit(0, 1, LOST_PEER.last_lines + OWN.last_lines),
            False,
        ),  # an error of a peer was handled, then its own
        (
            WorkerExit(0, 3, ("2026-01-01 10:00:00.1: I agent.cc:1] Socket closed", "I0000 00:00 x] Socket closed")),
            False,
        ),
        (WorkerExit(0, 1, ("Socket closed", *["later"] * 20)), False),
        (WorkerExit(0, 1, (TRACEBACK, "tfdist.membership.membership_errors.NoMajorityError: Too few workers")), True),
    ],
)
def test_reports_lost_peer(end, reports_lost_peer):
    assert end.reports_lost_peer is reports_lost_peer


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_exit_code_of_a_signal(number):
    assert WorkerExit(0, -number).exit_code == 128 + number


def test_unexplained_kill_hints_at_memory():
    assert "OOM killer" in KILLED.describe()
    assert WorkerExit(0, -9, was_signalled=True).describe() == "killed by SIGKILL"
