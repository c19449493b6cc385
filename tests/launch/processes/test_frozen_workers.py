"""Workers that are alive but make no progress: silent, stopped, or without a step."""

import os
import signal
import time

QUICK = ("--heartbeat-timeout", "1", "--grace", "0.5")
# Less than by default, 10 s, though more than a quiet machine takes; test_heartbeat_monitor.py has the exact times.
SOON_SECONDS = 8


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
    assert "worker 1 is frozen: no heartbeat for 1 s (last step 41)" in ended.said
    assert ended.said[-1] == ("worker 1 failed first: frozen: no heartbeat for 1 s (last step 41). It printed nothing.")
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
    assert "worker 1 is stopped (as by SIGSTOP): frozen unless it continues within 1 s (last step 3)" in ended.said
    # It was stopped just after a heartbeat: whichever is seen to last for a second first.
    frozen = tuple(f"worker 1 is frozen: {what} for 1 s" for what in ("no heartbeat", "stopped"))
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
        raise RuntimeError("UnavailableError: Collective ops is aborted by: Socket closed")
    """
    ended = run(script, "--heartbeat-timeout", "3", "--grace", "0.5")
    assert ended.code == 137
    assert any(line.startswith("worker 1 failed first: frozen: ") for line in ended.said)


def test_workers_that_are_not_judged(run):
    """One that sends no heartbeats, and one that is exiting: TensorFlow's shutdown may take long."""
    script = """
        if RANK == 0:
            note("silent")
            time.sleep(1.6)
        elif RANK == 1:
            beat(alive=True)
            beat(alive=False)
            time.sleep(1.6)
        else:
            wait_for("silent")
            end = time.monotonic() + 1.6
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
    time.sleep(1.6)  # longer than the timeout
    run.process.send_signal(signal.SIGCONT)
    (run._here / "go").touch()
    ended = run.end()
    assert (ended.code, [line for line in ended.said if "frozen" in line]) == (0, [])


def test_stall(run):
    script = """
        for step in range(4):
            beat(step=step)
            time.sleep(0.06)
        if RANK == 1:
            beat_on(step=4)
        beat_on(step=3)
    """
    ended = run(script, "--heartbeat-timeout", "0", "--stall-timeout", "1", "--grace", "0.5")
    assert ended.code == 1
    assert ended.said[-1].startswith("the attempt failed: no worker made a step for ")
    assert ended.said[-1].endswith("(last steps: 3, 4)")


def test_stall_in_validation(run):
    script = """
        for step in range(4):
            beat(step=step)
            time.sleep(0.06)
        beat(step=3, phase="validation", batch=0)
        beat_on(step=3, phase="validation", batch=2 + RANK)
    """
    ended = run(script, "--heartbeat-timeout", "0", "--stall-timeout", "1", "--grace", "0.5")
    assert ended.code == 1
    assert ended.said[-1].startswith("the attempt failed: no worker finished a batch of validation for ")


def test_phase_is_no_stall_and_a_timeout_of_zero_freezes_nobody(run):
    script = """
        for step in range(4):
            beat(step=step)
            time.sleep(0.06)
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
    ended = run(script, "--grace", "0.5")
    assert ended.code == 1
    assert "worker 1 failed first: an error, while it was still shutting down. Its last lines:" in ended.said
    assert ended.said[-1] == "  | KeyError: 'the cause'"


def test_worker_may_be_silent_while_it_saves_and_leaves(start):
    script = """
        def save(*_):
            time.sleep(1.6)
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        beat()
        note("up")
        while True:
            time.sleep(0.05)
            beat()
    """
    run = start(script, "--heartbeat-timeout", "1", workers=1)
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
            beat(error={"type": "UnavailableError", "message": "Socket closed"})
            note("reported")
            hang()
        wait_for("reported")
        time.sleep(1.2)  # more than a worker gets after a failure that leads to a restart
        sys.exit(7)
    """
    ended = run(script, "--max-restarts", "1")
    assert ended.code == 7
    assert not any(line.startswith("worker 0 failed first") for line in ended.said)
    assert "worker 1 failed first: exit code 7. It printed nothing." in ended.said
