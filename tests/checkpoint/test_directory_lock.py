"""The lock on a store's directory: between processes, never within one, and gone with the process."""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from replaced_clocks import slept_clock

from tfdist.checkpoint import CheckpointError, CheckpointStore, DirectoryLock
from tfdist.checkpoint import directory_lock as lock

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
    return slept_clock(monkeypatch, lock)


def test_another_process_is_waited_for_and_then_named(tmp_path, holder, clock, caplog):
    mine = DirectoryLock(tmp_path)
    with caplog.at_level(logging.WARNING, "tfdist"), pytest.raises(CheckpointError) as error:
        mine.acquire(90)
    who = f"process {holder.pid} on host {socket.gethostname()!r}"
    assert f"Another process trains in this directory. Received: {who} has held the lock of" in str(error.value)
    assert str(tmp_path) in str(error.value) and "for 90 s" in str(error.value) and "End that" in str(error.value)
    assert "A notebook keeps the lock of an interrupted `fit` until its next one" in str(error.value)
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


def descriptors_of(directory):
    """What this process has opened below a directory. Other threads of the tests open and close other files."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(str(directory))]


def test_within_a_process_the_last_one_has_it(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(f"{tmp_path}/../{tmp_path.name}")
    first.acquire(0)
    first.acquire(0)
    second.acquire(0)
    assert second.is_held and not first.is_held and len(descriptors_of(tmp_path)) == 1
    first.release()
    assert second.is_held and not is_free(tmp_path)
    second.release()
    second.release()
    assert not second.is_held and is_free(tmp_path)
    assert descriptors_of(tmp_path) == []


def test_whoever_reads_the_file_does_not_end_it(tmp_path):
    mine = DirectoryLock(tmp_path / "store")
    mine.acquire()
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    assert not is_free(tmp_path / "store") and is_free(tmp_path / "copy")
    mine.release()
    assert is_free(tmp_path / "store")


def in_fork(function):
    """What a fork of this process says to `function`, which returns whether all is well."""
    if (child := os.fork()) == 0:
        is_well = False
        signal.alarm(30)  # ends it if it waits indefinitely
        try:
            is_well = function()
        finally:
            os._exit(not is_well)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_neither_has_it_nor_ends_it(tmp_path):
    def refused():
        with pytest.raises(CheckpointError, match=f"process {os.getppid()} on host"):
            DirectoryLock(tmp_path).acquire(0)
        return True

    mine = DirectoryLock(tmp_path)
    mine.acquire()
    assert in_fork(lambda: not mine.is_held) and mine.is_held
    assert in_fork(refused)
    assert in_fork(lambda: mine.release() is None) and not is_free(tmp_path)
    with lock._guard:  # as by another thread, which the fork does not have
        assert in_fork(refused)
    mine.release()


def test_it_ends_with_the_process_though_a_fork_lives(tmp_path):
    fork = HOLD.replace("sys.stdin.read()", "import os; os.fork() or sys.stdin.read()")
    command = [sys.executable, "-c", fork, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        process.wait()
        assert is_free(tmp_path)
        process.stdin.close()
        assert process.stdout.read() == "", "now the fork has ended, too"


def refusing(number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number, caplog):
    monkeypatch.setattr(lock.fcntl, "fcntl", refusing(number))
    monkeypatch.setattr(lock.fcntl, "lockf", refusing(number))
    mine = DirectoryLock(tmp_path)
    with caplog.at_level(logging.INFO, "tfdist"):
        mine.acquire(0)
    assert not mine.is_held and descriptors_of(tmp_path) == [] and caplog.records == []
    mine.release()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_system_without_locks_of_descriptors(tmp_path, holder, monkeypatch, is_named):
    if is_named:
        monkeypatch.setattr(lock.fcntl, "fcntl", refusing(errno.EINVAL))
    else:
        monkeypatch.delattr(lock.fcntl, "F_OFD_SETLK")
    mine = DirectoryLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {holder.pid} on host"):
        mine.acquire(0)
    holder.communicate()
    mine.acquire(0)
    assert mine.is_held and not is_free(tmp_path)
    mine.release()


def test_what_could_not_be_locked_is_said(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "store"
    with caplog.at_level(logging.WARNING, "tfdist"):
        DirectoryLock(below).acquire(0)
        monkeypatch.setattr(lock.fcntl, "fcntl", refusing(errno.EIO))
        DirectoryLock(tmp_path).acquire(0)
    warnings = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[0] for text in warnings] == [
        f"No lock prevents another process from training in {directory}" for directory in (below, tmp_path)
    ]
    assert "Not a directory" in warnings[0] and "Input/output error" in warnings[1]


def test_a_full_disk_keeps_nobody_from_locking(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock.os, "pwrite", refusing(errno.ENOSPC))
    mine = DirectoryLock(tmp_path)
    mine.acquire(0)
    assert mine.is_held and not is_free(tmp_path) and caplog.records == []
    mine.release()


def test_the_store_ignores_it(tmp_path, save, assert_complete):
    mine = DirectoryLock(tmp_path)
    mine.acquire()
    store = CheckpointStore(tmp_path, keep=1)
    assert store.newest() == (None, []) and store.list_checkpoints() == []
    save(store, 1)
    save(store, 2)
    store.remove_unfinished()
    assert [entry.sequence for entry in store.list_checkpoints()] == [2] and store.prune(1) == []
    assert (tmp_path / ".lock").exists()
    assert_complete(store.newest()[0], 2)
    mine.release()
