"""Signals to one host, or to both, of a run over two hosts."""

import signal
import time

import pytest
from node_runs import HOST, NO_DELAY, says

SAVES = """
    def save(*_):
        note(f"signalled-{RANK}")
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    note(f"up-{RANK}")
    hang()
"""
# A second signal would kill it.
SAVES_UNTIL_GO = """
    def save(*_):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
        note(f"signalled-{RANK}")
        wait_for("signalled-0"), wait_for("signalled-1")
        wait_for("go")
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    note(f"up-{RANK}")
    hang()
"""


@pytest.mark.parametrize(
    ("name", "signalled"),
    [
        ("SIGTERM", 0),
        ("SIGUSR1", 1),
        pytest.param("SIGTERM", 1, marks=pytest.mark.long),
        pytest.param("SIGUSR1", 0, marks=pytest.mark.long),
    ],
)
def test_preemption_of_one_host_preempts_all(node, name, signalled):
    """All hosts get time to save; before a restart after a failure it would be half a second."""
    script = SAVES.replace("os._exit", "time.sleep(1.0); os._exit")
    runs = [node(rank, script, "--max-restarts", "3") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    runs[signalled].process.send_signal(signal.Signals[name])
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [75, 75], ended
    assert all(one.said[-1] == "preempted: all workers saved and exited (exit code 75)" for one in ended)
    assert says(ended[1 - signalled], f"ending the workers: {name} on node {signalled} ({HOST})")


def test_ctrl_c_on_one_host_ends_all_hosts(node):
    runs = [node(rank, "note(f'up-{RANK}'); hang()", "--max-restarts", "3") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    runs[1].process.send_signal(signal.SIGINT)
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [130, 130]
    assert says(ended[0], f"ending the workers: SIGINT on node 1 ({HOST})")


def test_second_ctrl_c_kills_on_all_hosts(node):
    script = "signal.signal(signal.SIGTERM, lambda *_: note(f'signalled-{RANK}')); note(f'up-{RANK}'); hang()"
    runs = [node(rank, script, "--grace", "600") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    runs[1].process.send_signal(signal.SIGINT)
    runs[0].wait_for("signalled-0", "signalled-1")
    runs[1].send_again(signal.SIGINT)
    assert [run.end().code for run in runs] == [130, 130]


def test_signal_to_each_host_is_not_a_second_signal(node):
    """A scheduler signals all hosts at the same time."""
    runs = [node(rank, SAVES_UNTIL_GO) for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
    runs[0].wait_for("signalled-0", "signalled-1")
    (runs[0]._here / "go").touch()
    assert [run.end().code for run in runs] == [75, 75]


def test_signal_while_waiting_for_a_host(node):
    run = node(0, "pass")
    said = []
    while not said or b"waiting for node 1" not in said[-1]:
        said.append(run.process.stderr.readline())
        assert said[-1], said
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 143


def test_no_restart_after_a_failure_and_a_signal(node):
    # Worker 0 stops its launcher, which would kill it half a second later. If it is too late, another attempt follows.
    script = """
        if RANK == 0:
            def stop(*_):
                os.kill(os.getppid(), signal.SIGSTOP)
                note("signalled", ATTEMPT)
            signal.signal(signal.SIGTERM, stop)
            note(f"up-{ATTEMPT}")
        wait_for(f"up-{ATTEMPT}")
        die() if RANK else hang()
    """
    options = ("--max-restarts", "9", "--grace", "60", "--heartbeat-timeout", "0", *NO_DELAY)
    runs = [node(rank, script, *options) for rank in (0, 1)]
    (attempt,) = runs[0].wait_for("signalled")
    runs[1].process.send_signal(signal.SIGTERM)
    time.sleep(3)  # in which the coordinator learns of it, also on a busy machine
    runs[0].process.send_signal(signal.SIGCONT)
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [137, 137]
    assert not any(says(one, f"restart {int(attempt) + 1}") for one in ended)


def test_another_signal_is_not_a_second_signal(node):
    """Slurm sends SIGUSR1 before the time limit, and SIGTERM at it; the workers save meanwhile."""
    runs = [node(rank, SAVES_UNTIL_GO) for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    runs[1].process.send_signal(signal.SIGUSR1)
    runs[0].wait_for("signalled-0", "signalled-1")
    runs[1].process.send_signal(signal.SIGTERM)
    time.sleep(1)  # long enough for all supervisors to kill
    (runs[0]._here / "go").touch()
    assert [run.end().code for run in runs] == [75, 75]
