"""Signals go to the chief first, while it saves."""

import signal

import pytest
from role_runs import ALL

SAVES = """
        def save(*_):
            {save}
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        note("ready")
        hang()
"""


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.long) for name in ("SIGUSR1", "SIGINT"))]
)
def test_only_the_chief_is_signalled_while_it_saves(begin, tmp_path, name):
    save = f"time.sleep(0.5); note('early', [task for task in {ALL!r} if (HERE / ('told-' + task)).exists()])"
    run = begin(SAVES.format(save=save))
    run.wait_for("ready", *(f"up-{task}-life-0" for task in ALL))
    run.process.send_signal(signal.Signals[name])
    ended = run.end()
    assert ended.code == 75
    assert (tmp_path / "early").read_text() == "[]"
    assert all((tmp_path / f"told-{task}").exists() for task in ALL)
    assert ended.said[-1] == "preempted: all workers saved and exited (exit code 75)"


def test_worker_that_dies_while_the_chief_saves_is_restarted(begin):
    run = begin(SAVES.format(save="kill('worker-0'); kill('worker-1'); up('worker-0', life=1)"))
    run.wait_for("ready", "up-worker-0-life-0", "up-worker-1-life-0")
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 75


def test_chief_signalled_by_another_process_is_restarted_with_all(run_roles):
    script = f"""
        if ATTEMPT == 0:
            up(*{ALL!r})
            os._exit(75)
    """
    ended = run_roles(script, "--max-restarts", "1", "--restart-delay", "0")
    assert ended.code == 0
    assert "restart 1 of 1 at once with 2 workers" in ended.said


def test_chief_that_does_not_save_in_time_is_killed_with_all(begin):
    run = begin(SAVES.format(save="time.sleep(60)"), "--grace", "0.3")
    run.wait_for("ready", *(f"up-{task}-life-0" for task in ALL))
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 143


def test_second_signal_kills_all(begin, tmp_path):
    run = begin(SAVES.format(save="note('saving'); time.sleep(60)"))
    run.wait_for("ready", *(f"up-{task}-life-0" for task in ALL))
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("saving")
    run.send_again(signal.SIGTERM)
    assert run.end().code == 143
    assert not any((tmp_path / f"told-{task}").exists() for task in ALL)
