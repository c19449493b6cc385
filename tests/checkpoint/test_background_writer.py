"""The background writer: one job at a time, no error lost, a running job finished."""

import gc
import logging
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist.checkpoint import BackgroundWriter, background_writer

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 30


class Gate:
    """A job that runs until the gate opens."""

    def __init__(self):
        self.started, self.open, self.thread = threading.Event(), threading.Event(), None

    def __call__(self):
        self.thread = threading.current_thread()
        self.started.set()
        assert self.open.wait(LIMIT_SECONDS)


def fail():
    raise OSError("the disk is gone")


def test_a_job_runs_beside_its_submitter():
    writer, gate = BackgroundWriter(), Gate()
    assert not writer.is_busy
    assert writer.submit(gate) < LIMIT_SECONDS
    assert gate.started.wait(LIMIT_SECONDS)
    assert writer.is_busy and writer.job_seconds == []
    assert gate.thread is not threading.current_thread() and not gate.thread.daemon
    gate.open.set()
    writer.wait()
    assert not writer.is_busy and len(writer.job_seconds) == 1


def test_the_next_job_waits_for_the_one_that_runs(monkeypatch):
    writer, first, order, seconds = BackgroundWriter(), Gate(), [], [0.0]

    def clock():
        read = seconds[0]
        if first.started.is_set():  # by `submit`, the second time: now it waits, or never
            first.open.set()
        return read

    def job():
        first()
        order.append("first")
        seconds[0] = 5.0

    # Not that of the module `time`, which other threads of the tests may read.
    monkeypatch.setattr(background_writer, "time", SimpleNamespace(monotonic=clock))
    writer.submit(job)
    assert first.started.wait(LIMIT_SECONDS)
    assert writer.submit(lambda: order.append("second")) == 5.0
    assert order[0] == "first"
    writer.wait()
    assert order == ["first", "second"]
    assert writer.job_seconds == [5.0, 0.0]


def test_an_error_is_raised_by_wait_once():
    writer = BackgroundWriter()
    writer.submit(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        writer.wait()
    writer.wait()
    assert len(writer.job_seconds) == 1


def test_an_error_is_raised_by_the_next_submit_and_its_job_is_not_started():
    writer, jobs = BackgroundWriter(), []
    writer.submit(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        writer.submit(lambda: jobs.append("never"))
    assert not writer.is_busy
    writer.submit(lambda: jobs.append("later"))
    writer.wait()
    assert jobs == ["later"]


def test_an_exit_within_a_job_is_an_error_too():
    writer = BackgroundWriter()
    writer.submit(sys.exit)
    with pytest.raises(SystemExit):
        writer.wait()


def test_an_error_that_was_not_raised_is_logged(caplog):
    writer = BackgroundWriter()
    writer.submit(fail)
    writer._thread.join(LIMIT_SECONDS)
    with caplog.at_level(logging.ERROR, "tfdist"):
        del writer
        gc.collect()
    assert "could not be written in the background" in caplog.text and "the disk is gone" in caplog.text


def test_an_error_that_was_raised_is_not_logged(caplog):
    writer = BackgroundWriter()
    writer.submit(fail)
    with pytest.raises(OSError):
        writer.wait()
    del writer
    gc.collect()
    assert not caplog.text


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise RuntimeError", 1)])
def test_the_interpreter_finishes_a_job_and_logs_its_error(tmp_path, end, code):
    program = f"""
import sys, threading, time
from tfdist.checkpoint import BackgroundWriter
started = threading.Event()
def job():
    started.set()
    while threading.main_thread().is_alive():  # until the interpreter waits for this thread
        time.sleep(0.001)
    open("done", "x").close()
    raise OSError("the disk is gone")
writer = BackgroundWriter()
writer.submit(job)
started.wait()
{end}
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert ended.returncode == code, ended.stderr
    assert (tmp_path / "done").exists()
    assert "could not be written in the background" in ended.stderr and "the disk is gone" in ended.stderr


def test_ctrl_c_while_the_thread_begins(monkeypatch):
    """It has begun all the same, and is waited for."""
    writer, started, may_end, start = BackgroundWriter(), threading.Event(), threading.Event(), threading.Thread.start

    def interrupted(self):
        start(self)
        assert started.wait(LIMIT_SECONDS)
        raise KeyboardInterrupt

    def job():
        started.set()
        assert may_end.wait(LIMIT_SECONDS)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.submit(job)
    is_known = writer.is_busy
    may_end.set()
    writer.wait()
    assert is_known and len(writer.job_seconds) == 1


def test_ctrl_c_before_the_thread_begins(monkeypatch):
    """It was not asked for any more: nobody would wait for it."""
    writer, given_up, done, start = BackgroundWriter(), [], [], threading.Thread.start

    def interrupted(self):
        given_up.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.submit(lambda: done.append(1))
    writer.wait()
    start(given_up[0])
    given_up[0].join(LIMIT_SECONDS)
    assert not writer.is_busy and done == []
