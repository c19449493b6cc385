"""The lock on a store's directory: between processes, never within one, and gone with the process."""

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tfdist.checkpoint import CheckpointError, CheckpointStore, DirectoryLock, lock

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from tfdist.checkpoint import DirectoryLock
lock = DirectoryLock(sys.argv[1])
lock.acquire(0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves; `during` is called in each sleep."""
    clock = types.SimpleNamespace(now=0.0, during=lambda: None)

    def sleep(seconds):
        clock.during()
        clock.now += seconds

    monkeypatch.setattr(lock, "time", types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    return clock


def test_another_process_is_waited_for_and_then_named(tmp_path, holder, clock, caplog):
    mine = DirectoryLock(tmp_path)
    with caplog.at_level(logging.WARNING, "tfdist"), pytest.raises(CheckpointError) as error:
        mine.acquire(90)
    who = f"process {holder.pid} on host {socket.gethostname()!r}"
    assert f"Another process trains in this directory. Received: {who} has held the lock of" in str(error.value)
    assert str(tmp_path) in str(error.value) and "for 90 s" in str(error.value) and "End that" in str(error.value)
    assert clock.now == pytest.approx(90, abs=1) and not mine.is_held
    assert [record.getMessage() for record in caplog.records] == [
        f"Waiting for another process that trains in {tmp_path}: {who}"
    ]


def test_one_that_is_killed_meanwhile_is_followed(tmp_path, holder, clock):
    def kill():
        holder.send_signal(signal.SIGKILL)
        holder.wait()

    clock.during = kill
    mine = DirectoryLock(tmp_path)
    mine.acquire()
    assert mine.is_held and clock.now < 1
    assert json.loads((tmp_path / ".lock").read_text()) == {"host": socket.gethostname(), "pid": os.getpid()}
    mine.release()


def is_free(directory):
    """Whether another process may have the lock."""
    run = subprocess.run(
        [sys.executable, "-c", HOLD, str(directory)],
        env={"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0 or "Another process trains in this directory" in run.stderr, run.stderr
    return run.returncode == 0


def test_within_a_process_the_last_one_has_it(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    first, second = DirectoryLock(tmp_path), DirectoryLock(f"{tmp_path}/../{tmp_path.name}")
    first.acquire(0)
    first.acquire(0)
    second.acquire(0)
    assert second.is_held and not first.is_held
    first.release()
    assert second.is_held and not is_free(tmp_path)
    second.release()
    second.release()
    assert not second.is_held and is_free(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fork_neither_has_it_nor_ends_it(tmp_path):
    mine = DirectoryLock(tmp_path)
    mine.acquire()
    if (child := os.fork()) == 0:
        os.closerange(3, 256)
        os._exit(0)
    os.waitpid(child, 0)
    assert not is_free(tmp_path)
    mine.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    before = len(os.listdir("/proc/self/fd"))
    mine = DirectoryLock(tmp_path)
    mine.acquire(0)
    assert not mine.is_held and len(os.listdir("/proc/self/fd")) == before
    mine.release()


def test_where_nothing_can_be_written_nothing_is_locked(tmp_path):
    (tmp_path / "file").touch()
    mine = DirectoryLock(tmp_path / "file" / "store")
    mine.acquire(0)
    assert not mine.is_held


def test_the_store_ignores_it(tmp_path, save, whole):
    mine = DirectoryLock(tmp_path)
    mine.acquire()
    store = CheckpointStore(tmp_path, keep=1)
    assert store.newest() == (None, []) and store.entries() == []
    save(store, 1)
    save(store, 2)
    store.clean()
    assert [entry.sequence for entry in store.entries()] == [2] and store.prune(1) == []
    assert (tmp_path / ".lock").exists()
    whole(store.newest()[0], 2)
    mine.release()
