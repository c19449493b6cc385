"""Workers that are alive but make no progress: silent, stopped, or without a step."""

import os
import signal
import time

# Where workers must not be taken for frozen: longer than a busy machine keeps one from sending.
TIMEOUT_SECONDS = 3
QUICK = ("--heartbeat-timeout", str(TIMEOUT_SECONDS), "--grace", "0.5")
LONGER_SECONDS = TIMEOUT_SECONDS + 0.6
# Less than by default, 10 s, though more than a quiet machine takes; test_heartbeat_monitor.py has the exact times.
SOON_SECONDS = 9


def test_silent_worker_is_frozen(run, tmp_path):
    script = """
        if RANK == 0:
            beat_on(step=7)
        wait_for("pid-0")
        beat(step=41)
        note("silent", time.time())
        hang()
    """
    ended = run(script, *QUICK)
    took = time.time() - float((tmp_path / "silent").read_text())
    assert ended.code == 137
    assert "worker 1 is frozen: no heartbeat for 3 s (last step 41)" in ended.said
    assert ended.said[-1] == ("worker 1 failed first: frozen: no heartbeat for 3 s (last step 41). It printed nothing.")
    assert "worker 0 ended after that: killed by SIGTERM" in ended.said
    assert took < SOON_SECONDS


def test_stopped_worker_is_reported_at_once_and_frozen_in_time(start):
    run = start("beat(step=3)\nnote(f'up-{RANK}')\nbeat_on(step=3)", *QUICK)
    run.wait_for("up-0", "up-1")
    stopped = time.monotonic()
    os.kill(run.pids()["pid-1"], signal.SIGSTOP)
    ended = run.end()
    assert time.monotonic() - stopped < SOON_SECONDS
    assert ended.code == 137
    assert "worker 1 is stopped (as by SIGSTOP): frozen unless it continues within 3 s (last step 3)" in ended.said
    # It was stopped just after a heartbeat: whichever is seen to last for the timeout first.
    frozen = tuple(f"worker 1 is frozen: {what} for 3 s" for what in ("no heartbeat", "stopped"))
    assert any(line.startswith(frozen) for line in ended.said)


def test_frozen_worker_leads_to_a_restart(run):
    script = """
        if ATTEMPT == 0:
            beat(step=1)
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            beat_on(step=1)
    """
    ended = run(script, *QUICK, "--max-restarts", "1", "--restart-delay", "0")
    assert ended.code == 0
    assert any(line.startswith("worker 1 failed first: frozen: ") for line in ended.said)


def test_stopped_worker_is_the_cause_though_a_peer_failed_of_it(run):
    """TensorFlow reports the loss of worker 1 to its peer long before the heartbeat timeout."""
    script = """
        beat(step=1)
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for("pid-1")
        wait_until(lambda: state_of("pid-1") == "T")
        raise RuntimeError("UnavailableError: Collective ops is aborted by: Socket closed")
    """
    ended = run(script, *QUICK)
    assert ended.code == 137
    assert any(line.startswith("worker 1 failed first: frozen: ") for line in ended.said)


def test_workers_that_are_not_judged(run):
    """One that sends no heartbeats, and one that is exiting: TensorFlow's shutdown may take long."""
    script = f"""
        if RANK == 0:
            note("silent")
            time.sleep({LONGER_SECONDS})
        elif RANK == 1:
            beat(alive=True)
            beat(alive=False)
            time.sleep({LONGER_SECONDS})
        else:
            wait_for("silent")
            end = time.monotonic() + {LONGER_SECONDS}
            while time.monotonic() < end:
                beat()
                time.sleep(0.05)
    """
    ended = run(script, *QUICK, workers=3)
    assert (ended.code, [line for line in ended.said if "frozen" in line]) == (0, [])


def test_stopped_launcher_does_not_take_its_workers_for_frozen(start, state):
    run = start("note('up')\nwhile not (HERE / 'go').exists(): beat(); time.sleep(0.05)", *QUICK, workers=1)
    run.wait_for("up")
    run.process.send_signal(signal.SIGSTOP)
    run.until(lambda: state(run.process.pid) == "T", "the stop")
    time.sleep(LONGER_SECONDS)
    run.process.send_signal(signal.SIGCONT)
    (run._here / "go").touch()
    ended = run.end()
    assert (ended.code, [line for line in ended.said if "frozen" in line]) == (0, [])


def test_stall(run):
    # Without two steps of one worker nothing is a stall: the last step of all is the first that has one before it.
    script = """
        if RANK == 1:
            beat(step=4)
            note("stepped")
            beat_on(step=4)
        wait_for("stepped")
        beat(step=2)
        beat_on(step=3)
    """
    ended = run(script, "--heartbeat-timeout", "0", "--stall-timeout", "1", "--grace", "0.5")
    assert ended.code == 1
    assert ended.said[-1].startswith("the attempt failed: no worker made a step for ")
    assert ended.said[-1].endswith("(last steps: 3, 4)")


def test_stall_in_validation(run):
    script = """
        beat(step=3)
        beat(step=3, phase="validation", batch=0)
        beat_on(step=3, phase="validation", batch=2 + RANK)
    """
    ended = run(script, "--heartbeat-timeout", "0", "--stall-timeout", "1", "--grace", "0.5")
    assert ended.code == 1
    assert ended.said[-1].startswith("the attempt failed: no worker finished a batch of validation for ")


def test_phase_is_no_stall_and_a_timeout_of_zero_freezes_nobody(run):
    script = """
        beat(step=2)
        beat(step=3, phase="validation")
        time.sleep(1.6)
    """
    assert run(script, "--heartbeat-timeout", "0", "--stall-timeout", "1", workers=1).code == 0


def test_error_is_acted_on_before_the_process_has_ended(run):
    """TensorFlow's shutdown takes up to 11 s after an exception, in which all other workers would wait."""
    script = """
        if RANK == 0:
            beat_on()
        from tfdist.cluster.heartbeat import Heartbeat
        heartbeat = Heartbeat.from_environment()
        heartbeat.start()
        import threading
        threading.Thread(target=hang).start()  # keeps the process from ending
        raise KeyError("the cause")
    """
    ended = run(script, "--grace", "3")  # the report of the error comes before its traceback
    assert ended.code == 1
    assert "worker 1 failed first: an error, while it was still shutting down. Its last lines:" in ended.said
    assert ended.said[-1] == "  | KeyError: 'the cause'"


def test_worker_may_be_silent_while_it_saves_and_leaves(start):
    script = f"""
        def save(*_):
            time.sleep({LONGER_SECONDS})
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        beat()
        note("up")
        while True:
            time.sleep(0.05)
            beat()
    """
    run = start(script, "--heartbeat-timeout", str(TIMEOUT_SECONDS), workers=1)
    run.wait_for("up")
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 75


def test_error_that_was_reported_and_not_printed(run):
    ended = run('beat(error={"type": "KeyError", "message": "x"}); hang()', "--grace", "0.5", workers=1)
    assert ended.code == 1
    assert ended.said[-1] == ("worker 0 failed first: an error, while it was still shutting down. It printed nothing.")


def test_error_that_echoes_a_peers_end_gives_the_peer_time(run):
    script = """
        if RANK == 0:
            wait_for("pid-1")
            beat(error={"type": "UnavailableError", "message": "Socket closed"})
            note("reported")
            hang()
        wait_for("reported")
        time.sleep(1.2)  # more than a worker gets after a failure that leads to a restart
        sys.exit(7)
    """
    ended = run(script, "--max-restarts", "1", "--grace", "60")
    assert ended.code == 7
    assert not any(line.startswith("worker 0 failed first") for line in ended.said)
    assert "worker 1 failed first: exit code 7. It printed nothing." in ended.said
