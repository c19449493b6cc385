import signal
import subprocess
import sys

import pytest

TIME_LIMIT = 30


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


def test_grandchild_in_a_session_of_its_own_is_ended(run):
    assert run("grandchild(f'child-{RANK}', start_new_session=True)", "--grace", "0.3").code == 0


def test_grandchild_that_keeps_the_pipe_does_not_keep_the_launcher(run):
    ended = run("grandchild(f'child-{RANK}', start_new_session=True, stdout=None); print('x'); os._exit(5)", workers=1)
    assert (ended.code, ended.out) == (5, ["[0] x"])


def test_children_of_the_caller_are_spared(tmp_path, environ):
    """`main` called from Python must not end what its caller started."""
    (tmp_path / "script.py").write_text("pass")
    code = """if True:
        import subprocess, sys
        from tfdist.launch.main import main
        child = subprocess.Popen(["sleep", "100"])
        assert main(["run", "--workers", "1", "script.py"]) == 0
        assert child.poll() is None
        child.kill()
    """
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, timeout=TIME_LIMIT)


def test_ignored_child_signal_does_not_hide_exit_codes(start):
    run = start("sys.exit(6)", workers=1, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert run.end().code == 6
