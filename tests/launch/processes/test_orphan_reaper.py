import os
import signal
import time

import pytest

TIME_LIMIT = 240


def test_killed_launcher_takes_the_workers_with_it(start, state):
    run = start("grandchild(f'child-{RANK}'); note(f'up-{RANK}'); hang()")
    run.wait_for("up-0", "up-1")
    run.process.kill()
    run.process.communicate()
    pids = run.pids()
    assert len(pids) == 4
    _wait_until_gone(pids.values(), state)


def test_killed_launcher_takes_the_workers_with_it_even_without_reaper(start, state):
    run = start("note(f'up-{RANK}'); hang()")
    run.wait_for("up-0", "up-1")
    reaper = _reaper_of(run)
    os.kill(reaper, signal.SIGKILL)
    run.until(lambda: state(reaper) in ("", "Z"), "the end of the reaper")
    run.process.kill()
    run.process.communicate()
    _wait_until_gone(run.pids().values(), state)


def test_reaper_ends_with_the_run(start, tmp_path, state):
    run = start("note(f'up-{RANK}'); wait_for('go')")
    run.wait_for("up-0", "up-1")
    reaper = _reaper_of(run)
    (tmp_path / "go").touch()
    assert run.end().code == 0
    assert state(reaper) == ""


def test_output_of_the_launcher_ends_with_the_launcher(start):
    """The reaper must not hold the pipe, or `tfdist run | cat` would wait for it."""
    run = start("note(f'up-{RANK}'); wait_for('go')")
    run.wait_for("up-0", "up-1")
    reaper = _reaper_of(run)
    ours = os.fstat(run.process.stdout.fileno()).st_ino
    # Three times /dev/null, and the pipe from the launcher: it may still be closing others.
    run.until(lambda: len(os.listdir(f"/proc/{reaper}/fd")) == 4, "the reaper's start")
    held = [os.stat(f"/proc/{reaper}/fd/{fd}").st_ino for fd in os.listdir(f"/proc/{reaper}/fd")]
    assert len(held) == 4
    assert ours not in held
    (run._here / "go").touch()
    assert run.end().code == 0


def _wait_until_gone(pids, state):
    end = time.monotonic() + TIME_LIMIT
    while any(state(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() < end, "processes left behind"
        time.sleep(0.01)


def _reaper_of(run):
    with open(f"/proc/{run.process.pid}/task/{run.process.pid}/children") as children:
        (reaper,) = set(map(int, children.read().split())) - set(run.pids().values())
    return reaper


def _ignores(pid, number):
    with open(f"/proc/{pid}/status") as status:
        (mask,) = [line.split()[1] for line in status if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("is_without_input", [False, True], ids=["SIGUSR1", "no standard input"])
def test_reaper_outlives(start, state, is_without_input):
    """Slurm sends SIGUSR1 to all processes of a step; without standard input the reaper's pipe has its number."""
    script = """
        if RANK == 0:
            grandchild("left")
        note(f"up-{RANK}")
        hang()
    """
    run = start(script, preexec_fn=(lambda: os.close(0)) if is_without_input else None)
    run.wait_for("up-0", "up-1")
    if not is_without_input:
        reaper = _reaper_of(run)
        run.until(lambda: _ignores(reaper, signal.SIGUSR1), "the reaper's start")
        os.kill(reaper, signal.SIGUSR1)
    run.process.kill()
    run.process.communicate()
    _wait_until_gone(run.pids().values(), state)
