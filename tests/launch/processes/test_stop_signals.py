import signal

import pytest


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


def test_second_interrupt_kills_even_if_the_output_is_blocked(start, state):
    """Nothing reads the launcher's output: it is blocked in a write."""
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
        run.until(lambda: "ShdPnd:\t0000000000000000" in _read(f"/proc/{run.process.pid}/status"), "the signal")
        run.until(lambda: is_stuck() or all(state(pid) in ("", "Z") for pid in pids), "the handler")
    run.until(lambda: all(state(pid) in ("", "Z") for pid in pids), "the end of the workers")
    assert run.end().code == 130


def test_interrupt_while_the_others_are_ended_keeps_the_cause(start, tmp_path):
    script = """
        if RANK == 1:
            wait_for("ready")
            sys.exit(4)
        signal.signal(signal.SIGTERM, lambda *_: note("told"))
        note("ready")
        hang()
    """
    with open(tmp_path / "err", "wb") as err:
        run = start(script, "--grace", "100000", stderr=err)
    run.wait_for("told")
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "SIGINT: already ending the workers" in _read(tmp_path / "err"), "the answer")
    run.process.send_signal(signal.SIGINT)
    assert run.end().code == 4
    assert "worker 1 failed first" in _read(tmp_path / "err")


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
