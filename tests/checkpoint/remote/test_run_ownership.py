"""Who may commit: the last that takes the run, and no request of earlier owners counts from then on."""

import os
import subprocess

import pytest
from simulated_objects import FaultyFileSystem, World, objects_of

from tfdist.checkpoint import CheckpointError, RemoteStoreError
from tfdist.checkpoint.errors import SupersededError
from tfdist.checkpoint.remote import run_ownership
from tfdist.checkpoint.remote.commit_log import commits, newest_epoch
from tfdist.checkpoint.remote.run_ownership import RunOwnership


@pytest.fixture
def objects():
    return objects_of(FaultyFileSystem(World()))


def owner(objects):
    return RunOwnership(objects, beat_seconds=0)


def contents(objects):
    return [content for _, content in commits(objects)]


def test_an_earlier_owner_cannot_commit(objects):
    first, second = owner(objects), owner(objects)
    first.acquire()
    first.writer.commit(objects, b"one")
    second.acquire()
    with pytest.raises(SupersededError, match="Another process has taken over this training"):
        first.writer.commit(objects, b"two")
    assert not first.is_held and second.is_held
    second.writer.commit(objects, b"three")
    assert contents(objects) == [b"three", b"one"]


def test_a_commit_that_arrives_late_does_not_count(objects, monkeypatch):
    first, second, file_system = owner(objects), owner(objects), objects.connection.file_system
    first.acquire()
    requests = []

    def lose(path, content, mode="overwrite"):
        requests.append((path, content, mode))
        raise OSError("Connection reset by peer")

    with monkeypatch.context() as patch, pytest.raises(RemoteStoreError):
        patch.setattr(file_system, "pipe_file", lose)
        first.writer.commit(objects, b"late")
    second.acquire()
    for request in requests:
        assert not file_system.world.apply(*request), "its place is taken"
    assert contents(objects) == []


def test_what_was_unknown_is_settled_by_the_next(objects, monkeypatch):
    lock, file_system = owner(objects), objects.connection.file_system
    lock.acquire()
    write = file_system.pipe_file

    def lose_reply(path, content, mode="overwrite"):
        write(path, content, mode)
        raise OSError("Connection reset by peer")

    def lose(*_, **__):
        raise OSError("Connection reset by peer")

    for lost, name in ((lose_reply, b"arrived"), (lose, b"lost")):
        with monkeypatch.context() as patch, pytest.raises(RemoteStoreError):
            patch.setattr(file_system, "pipe_file", lost)
            patch.setattr(file_system, "cat_file", lose)
            lock.writer.commit(objects.for_operation(), name)
        settled, dropped = lock.writer.commit(objects.for_operation(), b"after " + name)
        known = [name] * (name == b"arrived")
        assert [content for _, content in settled] == [*known, b"after " + name]
        assert dropped == [name] * (not known)
    assert contents(objects) == [b"after lost", b"after arrived", b"arrived"]


def test_an_owner_that_died_before_it_sealed_is_passed(objects, monkeypatch):
    first, third, file_system = owner(objects), owner(objects), objects.connection.file_system
    first.acquire()
    first.writer.commit(objects, b"one")
    write = file_system.pipe_file

    def die(path, content, mode="overwrite"):
        if "/commits/" in path:
            raise KeyboardInterrupt
        write(path, content, mode)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(file_system, "pipe_file", die)
        owner(objects).acquire()
    third.acquire()
    with pytest.raises(SupersededError):
        first.writer.commit(objects, b"two")
    assert contents(objects) == [b"one"]


def test_an_attempt_without_an_answer_is_continued_by_the_next_in_its_process(objects, monkeypatch):
    owner(objects).acquire()
    lock, file_system = owner(objects), objects.connection.file_system
    write = file_system.pipe_file

    def lose_seals(path, content, mode="overwrite"):
        if "/commits/" in path:
            raise OSError("Connection reset by peer")
        write(path, content, mode)

    for process, epochs in ((os.getpid(), 2), (-1, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(file_system, "pipe_file", lose_seals)
            patch.setattr(run_ownership.os, "getpid", lambda process=process: process)
            for _ in range(3):
                with pytest.raises(RemoteStoreError):
                    lock.take_over()
        assert newest_epoch(objects) == epochs, "each has created one, and a fork its own"
    lock.acquire()
    lock.writer.commit(objects, b"one")
    assert contents(objects) == [b"one"]


class _Elsewhere:
    """Owners are on another host, and show themselves every 10 s of simulated time while they live."""

    def __init__(self, objects, monkeypatch):
        monkeypatch.setattr(run_ownership, "_has_ended", lambda owner: False)
        self.lives, world = True, objects.connection.file_system.world
        pass_time = objects.sleep

        def sleep(seconds):
            pass_time(seconds)
            if self.lives:
                world.objects["bucket/run/beats/0000000001"] = str(world.now // 10).encode()

        objects.sleep = sleep


def test_an_owner_that_lives_is_waited_for(objects, monkeypatch, caplog):
    owner(objects).acquire()
    _Elsewhere(objects, monkeypatch)
    lock = RunOwnership(objects, beat_seconds=10)
    with pytest.raises(CheckpointError, match=rf"Another process trains .*process {os.getpid()} on host .* for 100 s"):
        lock.acquire()
    assert not lock.is_held and "Waiting for another process that trains in bucket/run" in caplog.text
    assert 100 <= objects.clock() < 140


def test_an_owner_that_is_silent_or_has_released_it_is_followed(objects, monkeypatch):
    first = owner(objects)
    first.acquire()
    _Elsewhere(objects, monkeypatch).lives = False
    second = owner(objects)
    begun = objects.clock()
    assert run_ownership._shows_itself(objects, 1, {}, 10.0) is False
    assert 30 <= objects.clock() - begun < 35, "three beats"
    first.release()
    begun = objects.clock()
    second.acquire()
    assert objects.clock() - begun < 5 and second.is_held


def test_a_process_of_this_host_is_known_to_have_ended():
    here = run_ownership._this_process()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        other = {**here, "pid": process.pid, "started": run_ownership._start_of(process.pid)}
        assert not run_ownership._has_ended(other)
        assert run_ownership._has_ended({**other, "started": 1}), "a later process has its number"
        process.stdin.close()
        process.wait(60)
    assert run_ownership._has_ended(other)
    assert run_ownership._has_ended(here), "a training of this process may follow another"
    assert not run_ownership._has_ended({**other, "kernel": "another"})
    assert not run_ownership._has_ended({})
