import signal

import pytest

from tfdist.launch.failure import WorkerEnd, cause

TRACEBACK = "Traceback (most recent call last):"
OWN = WorkerEnd(0, 1, (TRACEBACK, "  File", "ValueError: mine"))
# As TensorFlow 2.21 puts it when a peer is killed.
ECHO = WorkerEnd(
    1,
    1,
    (
        TRACEBACK,
        "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:",
        "Collective ops is aborted by: recvmsg:Connection reset by peer",
    ),
)
KILLED = WorkerEnd(2, -9)
TOLD = WorkerEnd(3, -15, was_told=True)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([], None),
        ([WorkerEnd(0, 0)], None),
        ([TOLD], None),
        ([OWN, KILLED], OWN),
        ([KILLED, OWN], KILLED),
        ([ECHO, OWN], OWN),
        ([ECHO, TOLD, KILLED], KILLED),
        ([ECHO, TOLD], ECHO),
        ([ECHO, WorkerEnd(2, 1, ECHO.last_lines)], ECHO),
        ([ECHO, WorkerEnd(3, -15, OWN.last_lines, was_told=True)], WorkerEnd(3, -15, OWN.last_lines, was_told=True)),
        ([OWN, WorkerEnd(3, -15, OWN.last_lines, was_told=True)], OWN),
    ],
)
def test_cause(ends, first):
    assert cause(ends) is first or cause(ends) == first


@pytest.mark.parametrize(
    ("end", "is_echo"),
    [
        (OWN, False),
        (ECHO, True),
        (KILLED, False),
        (WorkerEnd(0, -9, ECHO.last_lines), False),
        (WorkerEnd(0, -6, ("E0000 Failed to send RPC to coordination service. Either the leader",)), True),
        (WorkerEnd(0, 1, ECHO.last_lines + OWN.last_lines), False),  # an error of a peer was handled, then its own
        (
            WorkerEnd(0, 3, ("2026-01-01 10:00:00.1: I agent.cc:1] Socket closed", "I0000 00:00 x] Socket closed")),
            False,
        ),
        (WorkerEnd(0, 1, ("Socket closed", *["later"] * 20)), False),
    ],
)
def test_is_echo(end, is_echo):
    assert end.is_echo is is_echo


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_exit_code_of_a_signal(number):
    assert WorkerEnd(0, -number).exit_code == 128 + number


def test_kill_by_nobody_hints_at_memory():
    assert "out of memory" in KILLED.describe()
    assert WorkerEnd(0, -9, was_told=True).describe() == "killed by SIGKILL"
