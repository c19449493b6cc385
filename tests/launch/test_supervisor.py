import os
import signal
import subprocess
import sys

import pytest

TIME_LIMIT = 30


def test_all_end_with_zero(run):
    ended = run("print(RANK)", workers=3)
    assert (ended.code, sorted(ended.out)) == (0, ["[0] 0", "[1] 1", "[2] 2"])


def test_one_that_ends_with_zero_leaves_the_others_alone(run):
    ended = run("wait_gone(0) if RANK else None; print('ended', RANK)")
    assert (ended.code, ended.out) == (0, ["[0] ended 0", "[1] ended 1"])


@pytest.mark.parametrize("code", [1, 3, 77, 255])
def test_exit_code_of_the_first_failure(run, code):
    ended = run(f"sys.exit({code}) if RANK == 1 else hang()")
    assert ended.code == code
    assert f"worker 1 failed: exit code {code}" in ended.said
    assert f"worker 1 failed first: exit code {code}. It printed nothing." in ended.said


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_signal_of_the_first_failure(run, name):
    ended = run(f"os.kill(os.getpid(), signal.{name}) if RANK == 0 else hang()")
    assert ended.code == 128 + signal.Signals[name]
    assert any(line.startswith(f"worker 0 failed first: killed by {name}") for line in ended.said)


def test_last_lines_of_the_first_failure(run):
    script = """
        if RANK == 0:
            print("not me")
            hang()
        wait_for("pid-0")
        for i in range(50):
            print("line", i)
        raise KeyError("the cause")
    """
    ended = run(script)
    report = ended.said[ended.said.index("worker 1 failed first: exit code 1. Its last lines:") + 1 :]
    assert len(report) == 20
    assert report[-1] == "  | KeyError: 'the cause'"
    assert any("line 49" in line for line in report)
    assert not any("line 29" in line or "not me" in line for line in report)


def test_output_written_just_before_the_end_is_in_the_report(run):
    ended = run("os.write(1, b'x' * 60_000 + b'\\nlast words'); os._exit(9)", workers=1)
    assert ended.said[-1] == "  | last words"


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (0, 1, 2)])
def test_first_in_time_among_several_failures(start, state, order):
    """The launcher is stopped while they end, so that it sees all of them at once."""
    run = start("note(f'up-{RANK}'); wait_for(f'go-{RANK}'); os._exit(10 + RANK)", workers=3)
    run.wait_for("up-0", "up-1", "up-2")
    pids = run.pids()
    run.process.send_signal(signal.SIGSTOP)
    for rank in order:
        (run._here / f"go-{rank}").touch()
        run.until(lambda rank=rank: state(pids[f"pid-{rank}"]) == "Z", f"the end of worker {rank}")
    run.process.send_signal(signal.SIGCONT)
    ended = run.end()
    assert ended.code == 10 + order[0]
    assert any(line.startswith(f"worker {order[0]} failed first: exit code {10 + order[0]}") for line in ended.said)


def test_echo_of_a_failing_peer_is_never_the_cause(run):
    script = """
        if RANK == 0:
            wait_for("pid-1")
            raise RuntimeError("UnavailableError: Collective ops is aborted by: Socket closed")
        wait_gone(0)
        print("the cause")
        os._exit(7)
    """
    ended = run(script, "--grace", "30")
    assert ended.code == 7
    assert "worker 0 ended after that: exit code 1" not in ended.said[:-3]
    assert ended.said[-2:] == ["worker 1 failed first: exit code 7. Its last lines:", "  | the cause"]


def test_peer_that_is_still_shutting_down_is_the_cause_of_an_echo(run):
    script = """
        if RANK == 0:
            wait_for("raised")
            raise RuntimeError("Error received from peer")
        try:
            raise KeyError("the cause")
        except KeyError:
            import traceback
            traceback.print_exc()
        note("raised")
        hang()
    """
    ended = run(script, "--grace", "0.3")
    assert ended.code == 1
    assert "worker 1 failed first: an error, while it was still shutting down. Its last lines:" in ended.said
    assert ended.said[-1] == "  | KeyError: 'the cause'"


def test_echo_alone_is_reported(run):
    ended = run("hang() if RANK else None; raise RuntimeError('Socket closed')", "--grace", "0.2")
    assert ended.code == 1
    assert "worker 0 failed first: exit code 1. Its last lines:" in ended.said


def test_the_others_get_sigterm_and_time(run):
    script = """
        if RANK == 1:
            wait_for("ready")
            sys.exit(4)
        def leave(*_):
            print("saving")
            note("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        note("ready")
        hang()
    """
    ended = run(script, "--grace", "60")
    assert ended.code == 4
    assert ended.of(0) == ["saving"]
    assert "worker 0 ended after that: exit code 0" in ended.said


def test_worker_that_ignores_sigterm_is_killed_after_the_grace(run):
    script = """
        if RANK == 1:
            wait_for("ready")
            sys.exit(4)
        signal.signal(signal.SIGTERM, lambda *_: print("no"))
        note("ready")
        hang()
    """
    ended = run(script, "--grace", "0.4")
    assert ended.code == 4
    assert ended.of(0) == ["no"]
    assert "worker 0 ended after that: killed by SIGKILL" in ended.said


@pytest.mark.parametrize("code", ["hang()", "signal.signal(signal.SIGTERM, signal.SIG_IGN); hang()"])
def test_grandchildren_are_ended(run, tmp_path, code):
    ended = run(f"grandchild(f'child-{{RANK}}', {code!r}); wait_for(f'pid-child-{{1 - RANK}}'); sys.exit(RANK)", "--grace", "0.3")
    assert ended.code == 1
    assert len(list(tmp_path.glob("pid-child-*"))) == 2  # the fixture looks that they are gone


def test_grandchildren_are_ended_after_success(run):
    assert run("grandchild(f'child-{RANK}')", "--grace", "0.3").code == 0


def test_grandchild_in_a_session_of_its_own_is_ended(run):
    assert run("grandchild(f'child-{RANK}', start_new_session=True)", "--grace", "0.3").code == 0


def test_grandchild_that_keeps_the_pipe_does_not_keep_the_launcher(run):
    ended = run("grandchild(f'child-{RANK}', start_new_session=True, stdout=None); print('x'); os._exit(5)", workers=1)
    assert (ended.code, ended.out) == (5, ["[0] x"])


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_stop_signal_ends_all(start, name, code):
    script = """
        grandchild(f"child-{RANK}")
        def leave(*_):
            note(f"told-{RANK}")
            sys.exit(1)
        signal.signal(signal.SIGTERM, leave)
        note(f"up-{RANK}")
        hang()
    """
    run = start(script, "--grace", "30")
    run.wait_for("up-0", "up-1")
    run.process.send_signal(signal.Signals[name])
    ended = run.end()
    assert ended.code == code
    assert (run._here / "told-0").exists() and (run._here / "told-1").exists()
    assert any(line.startswith(f"{name}: ending the workers") for line in ended.said)
    assert not any("failed" in line for line in ended.said)


def test_stop_signal_kills_after_the_grace(start):
    run = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); note(f'up-{RANK}'); hang()", "--grace", "0.3")
    run.wait_for("up-0", "up-1")
    run.process.send_signal(signal.SIGINT)
    assert run.end().code == 130


def test_second_interrupt_kills_at_once(start):
    script = "signal.signal(signal.SIGTERM, lambda *_: note(f'told-{RANK}')); note(f'up-{RANK}'); hang()"
    run = start(script, "--grace", "100000")
    run.wait_for("up-0", "up-1")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("told-0", "told-1")
    run.process.send_signal(signal.SIGINT)
    assert run.end().code == 130


def test_second_interrupt_kills_even_when_the_output_is_stuck(start, state):
    """Nobody reads the launcher's output: it is stuck in a write."""
    run = start("note(f'up-{RANK}')\nwhile True: print('x' * 10_000)")
    run.wait_for("up-0", "up-1", "pid-0", "pid-1")
    pids = list(run.pids().values())

    def is_stuck():
        return state(run.process.pid) == "S" and "pipe_w" in _read(f"/proc/{run.process.pid}/wchan")

    if not _read(f"/proc/{run.process.pid}/wchan"):
        pytest.skip("this kernel does not say where a process waits")
    run.until(is_stuck, "the write")
    for _ in range(2):
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: "SigPnd:\t0000000000000000" in _read(f"/proc/{run.process.pid}/status"), "the signal")
        run.until(lambda: is_stuck() or all(state(pid) in ("", "Z") for pid in pids), "the handler")
    run.until(lambda: all(state(pid) in ("", "Z") for pid in pids), "the end of the workers")
    assert run.end().code == 130


def test_interrupt_while_the_others_are_ended_keeps_the_cause(start):
    script = """
        if RANK == 1:
            wait_for("ready")
            sys.exit(4)
        signal.signal(signal.SIGTERM, lambda *_: note("told"))
        note("ready")
        hang()
    """
    run = start(script, "--grace", "100000")
    run.wait_for("told")
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    run.until(lambda: run.process.poll() is not None or run.process.send_signal(signal.SIGTERM), "the end")
    ended = run.end()
    assert ended.code == 4
    assert any(line.startswith("worker 1 failed first") for line in ended.said)


def test_killed_launcher_takes_the_workers_with_it(start, state):
    run = start("grandchild(f'child-{RANK}'); note(f'up-{RANK}'); hang()")
    run.wait_for("up-0", "up-1")
    run.process.kill()
    run.process.communicate()
    pids = run.pids()
    assert len(pids) == 4
    _wait_until_gone(pids.values(), state)


def test_guardian_ends_with_the_run(start, tmp_path, state):
    run = start("note(f'up-{RANK}'); wait_for('go')")
    run.wait_for("up-0", "up-1")
    children = {int(pid) for pid in _read(f"/proc/{run.process.pid}/task/{run.process.pid}/children").split()}
    guardian = children - set(run.pids().values())
    assert len(guardian) == 1
    (tmp_path / "go").touch()
    assert run.end().code == 0
    assert state(guardian.pop()) == ""


def test_output_of_the_launcher_ends_with_the_launcher(start):
    """The guardian must not hold the pipe, or `tfdist run | cat` would wait for it."""
    run = start("note(f'up-{RANK}'); wait_for('go')")
    run.wait_for("up-0", "up-1")
    children = {int(pid) for pid in _read(f"/proc/{run.process.pid}/task/{run.process.pid}/children").split()}
    (guardian,) = children - set(run.pids().values())
    ours = os.fstat(run.process.stdout.fileno()).st_ino
    held = [os.stat(f"/proc/{guardian}/fd/{fd}").st_ino for fd in os.listdir(f"/proc/{guardian}/fd")]
    assert len(held) == 4  # three times /dev/null, and the pipe from the launcher
    assert ours not in held
    (run._here / "go").touch()
    assert run.end().code == 0


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


def _wait_until_gone(pids, state):
    import time

    end = time.monotonic() + TIME_LIMIT
    while any(state(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() < end, "processes left behind"
        time.sleep(0.01)


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
