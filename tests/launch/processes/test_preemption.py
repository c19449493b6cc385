"""Preemption: signals that are passed on, and workers that saved and exited."""

import signal

import pytest

SAVES = """
    def save(*_):
        note(f"told-{RANK}")
        print("saved")
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    note(f"up-{RANK}")
    hang()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("restarts", ["0", "3"])
def test_signalled_workers_save_and_the_run_exits_with_75(start, name, restarts):
    run = start(SAVES, "--max-restarts", restarts)
    run.wait_for("up-0", "up-1")
    run.process.send_signal(signal.Signals[name])
    ended = run.end()
    assert ended.code == 75
    assert ended.said[-1] == "preempted: all workers saved and exited (exit code 75)"
    assert ended.said[-2].startswith(f"{name}: ending the workers (SIGTERM, after 25 s SIGKILL")
    assert not any("failed" in line or "restart" in line for line in ended.said)


def test_one_may_have_finished_already(start, state):
    run = start("note('through') if RANK else wait_for('through')\nif RANK: sys.exit()\n" + _dedented(SAVES))
    run.wait_for("up-0")
    run.until(lambda: state(run.pids()["pid-1"]) in ("", "Z"), "the end of worker 1")
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 75


def test_worker_that_does_not_save_in_time_is_killed(start):
    script = """
        signal.signal(signal.SIGTERM, (lambda *_: os._exit(75)) if RANK else signal.SIG_IGN)
        note(f"up-{RANK}")
        hang()
    """
    run = start(script, "--grace", "0.4")
    run.wait_for("up-0", "up-1")
    run.process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 143
    assert not any("preempted: all" in line for line in ended.said)


def test_signalled_workers_have_time_to_save_even_if_restarts_are_left(start):
    """After a failure workers have half a second before a restart; to save they have the full grace period."""
    script = """
        def save(*_):
            time.sleep(1.5)
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        note(f"up-{RANK}")
        hang()
    """
    run = start(script, "--max-restarts", "3")
    run.wait_for("up-0", "up-1")
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 75


def test_workers_signalled_by_another_process_are_restarted(run):
    script = """
        if ATTEMPT == 0:
            signal.signal(signal.SIGTERM, lambda *_: note(f"told-{RANK}"))
            if RANK == 1:
                wait_gone(0)
            os._exit(75)
    """
    ended = run(script, "--max-restarts", "1", "--restart-delay", "0")
    assert ended.code == 0
    assert "all workers saved and exited, although this command received no signal" in ended.said
    assert ended.said[-1] == "restart 1 of 1 at once with 2 workers"


def test_workers_signalled_by_another_process_end_the_run_if_no_restart_is_left(run):
    ended = run("os._exit(75)")
    assert ended.code == 75
    assert ended.said[-1] == "preempted: all workers saved and exited (exit code 75)"


def test_worker_that_still_saves_is_not_signalled_when_another_has_exited(run, tmp_path):
    """It would be the second signal, which ends the worker at once, during the checkpoint."""
    script = """
        if RANK == 0:
            wait_for("ready")
            os._exit(75)
        signal.signal(signal.SIGTERM, lambda *_: note("told"))
        note("ready")
        wait_gone(0)
        time.sleep(0.5)  # time in which it would be signalled
        os._exit(75)
    """
    assert run(script, "--max-restarts", "0").code == 75
    assert not (tmp_path / "told").exists()


def test_worker_that_stays_after_a_preemption_is_ended_after_the_grace_period(run):
    ended = run("hang() if RANK else os._exit(75)", "--grace", "0.4")
    assert ended.code == 75
    assert not any(line.startswith("preempted: all") for line in ended.said)
    assert "worker 1 ended after that: killed by SIGTERM" in ended.said


def test_failure_is_the_cause_though_another_was_preempted(run):
    ended = run("os._exit(75) if RANK == 0 else (wait_gone(0), sys.exit(4))")
    assert ended.code == 4
    assert "worker 1 failed first: exit code 4. It printed nothing." in ended.said


def test_second_signal_ends_at_once(start):
    run = start("signal.signal(signal.SIGTERM, lambda *_: note(f'told-{RANK}')); note(f'up-{RANK}'); hang()")
    run.wait_for("up-0", "up-1")
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for("told-0", "told-1")
    run.send_again(signal.SIGUSR1)
    assert run.end().code == 128 + signal.SIGUSR1


def _dedented(script):
    return "\n".join(line.removeprefix("    ") for line in script.splitlines())
