import os
import shutil
import signal
import subprocess
import sys

import pytest

TIME_LIMIT = 240


@pytest.mark.parametrize("code", ["hang()", "signal.signal(signal.SIGTERM, signal.SIG_IGN); hang()"])
def test_grandchildren_are_ended(run, tmp_path, code):
    ended = run(
        f"grandchild(f'child-{{RANK}}', {code!r}); wait_for(f'pid-child-{{1 - RANK}}'); sys.exit(RANK)",
        "--grace",
        "0.3",
    )
    assert ended.code == 1
    assert len(list(tmp_path.glob("pid-child-*"))) == 2  # the fixture looks that they are gone


def test_grandchildren_are_ended_after_success(run):
    assert run("grandchild(f'child-{RANK}')", "--grace", "0.3").code == 0


def test_grandchild_in_another_session_is_ended(run):
    assert run("grandchild(f'child-{RANK}', start_new_session=True)", "--grace", "0.3").code == 0


def test_grandchild_that_holds_the_pipe_does_not_block_the_launcher(run):
    ended = run("grandchild(f'child-{RANK}', start_new_session=True, stdout=None); print('x'); os._exit(5)", workers=1)
    assert (ended.code, ended.out) == (5, ["[0] x"])


def test_children_of_the_caller_are_spared(tmp_path, environ):
    """`main` called from Python must not end what its caller started."""
    (tmp_path / "script.py").write_text("pass")
    code = """if True:
        import subprocess, sys
        from tfdist.launch.cli.main import main
        child = subprocess.Popen(["sleep", "100"])
        assert main(["run", "--workers", "1", "script.py"]) == 0
        assert child.poll() is None
        child.kill()
    """
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, timeout=TIME_LIMIT)


def test_ignored_child_signal_does_not_hide_exit_codes(start):
    run = start("sys.exit(6)", workers=1, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert run.end().code == 6


def test_orphans_are_reaped_while_the_workers_run(start, state):
    """Their parents have ended, so they are children of the launcher: a long run would have thousands."""
    script = """
        if RANK == 0:
            for number in range(5):
                subprocess.run(f"true & echo $! > {HERE}/pid-orphan-{number}", shell=True, check=True)
            note("up")
        hang()
    """
    run = start(script)
    run.wait_for("up")
    orphans = [pid for name, pid in run.pids().items() if name.startswith("pid-orphan")]
    assert len(orphans) == 5
    run.until(lambda: not any(map(state, orphans)), "the end of the orphans")
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 143


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs to become another user")
def test_process_that_may_not_be_killed_does_not_block_the_launcher(tmp_path, environ):
    """It belongs to another user, as a process of `sudo`."""
    script = """if True:
        import pathlib, subprocess
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        child = subprocess.Popen(["sleep", "600"], user=12345, start_new_session=True, **quiet)
        pathlib.Path("stray").write_text(str(child.pid))
    """
    (tmp_path / "script.py").write_text(script)
    powerless = ["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill"]
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "1", "--network", "host", "script.py"]
    run = subprocess.Popen([*powerless, *launcher], cwd=tmp_path, env=environ)
    try:
        assert run.wait(TIME_LIMIT) == 0
    finally:
        run.kill()
        run.wait()
        os.kill(int((tmp_path / "stray").read_text()), signal.SIGKILL)
