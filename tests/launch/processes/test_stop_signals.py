import signal
import time

import pytest

from tfdist.launch.processes import stop_signals


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
    run.send_again(signal.SIGINT)
    assert run.end().code == 130


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.long)])
def test_signal_that_arrives_twice_within_a_second_is_one(start, state, name):
    """Slurm signals the launcher, and so does the shell that started it."""
    script = """
        signal.signal(signal.SIGTERM, lambda *_: (wait_for(sys.argv[1] + "-go"), os._exit(75)))
        note(f"{sys.argv[1]}-up-{RANK}")
        hang()
    """

    def is_handled(process):
        is_pending = "ShdPnd:\t0000000000000000" not in _read(f"/proc/{process.pid}/status")
        return process.poll() is not None or (not is_pending and state(process.pid) == "S")

    for turn in range(20):  # until all come within a second; a later one ends the run
        run = start(script, arguments=[str(turn)])
        run.wait_for(f"{turn}-up-0", f"{turn}-up-1")
        began = time.monotonic()
        for _ in range(5):
            run.process.send_signal(signal.Signals[name])
            run.until(lambda run=run: is_handled(run.process), "the handler")
        took = time.monotonic() - began
        (run._here / f"{turn}-go").touch()
        code = run.end().code
        if took < 1:
            break
    assert took < 1 and code == 75


def test_burst_of_signals_counts_once_a_second(monkeypatch):
    """Otherwise each signal would start the second again, and none would ever count."""
    now, repeats = [0.0], []
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now[0])
    with stop_signals.StopSignals(on_repeat=lambda: repeats.append(now[0])) as signals:
        for tick in range(9):
            now[0] = tick * 0.3
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)  # another one counts at once
    assert signals.received == [signal.SIGTERM] * 3 + [signal.SIGUSR1]
    assert repeats == [pytest.approx(1.2), pytest.approx(2.4)]


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
        run.send_again(signal.SIGINT)
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
    run.send_again(signal.SIGINT)
    assert run.end().code == 4
    assert "worker 1 failed first" in _read(tmp_path / "err")


def _read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
