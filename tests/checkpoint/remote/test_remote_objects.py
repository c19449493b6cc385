"""Requests are repeated, lost replies are recognised, and what a server does not honour is told."""

import logging
import socket

import pytest
from optional_packages import require
from s3_server import S3Server
from simulated_objects import FaultyFileSystem, World, objects_of

from tfdist.checkpoint import RemoteStoreError
from tfdist.checkpoint.remote.remote_objects import connect_store
from tfdist.utils import remote_requests


class Scripted(FaultyFileSystem):
    """Its next requests fail in these ways."""

    def __init__(self, *failures):
        super().__init__(World())
        self.failures = list(failures)
        self.requests = 0

    def _request(self, failure):
        self.requests += 1
        if self.failures:
            error = self.failures.pop(0)
            if error is not None:
                raise error


def test_requests_are_repeated_until_patience_ends():
    file_system = Scripted(*[OSError(5, "SlowDown")] * 4)
    objects_of(file_system).put("a", b"1")
    assert file_system.requests == 5 and file_system.world.objects == {"bucket/run/a": b"1"}
    assert 0.7 < file_system.world.now <= 1.5, "pauses of 0.1, 0.2, 0.4 and 0.8 s, each up to half shorter"
    silent = Scripted(*[OSError(5, "SlowDown")] * 1000)
    with pytest.raises(RemoteStoreError, match=r"'bucket/run/a' could not be read. Received: OSError: .*SlowDown"):
        objects_of(silent, patience_seconds=60).get("a")
    assert 30 < silent.world.now < 60 and silent.requests < 20


def test_patience_is_that_of_an_operation():
    objects = objects_of(Scripted(*[OSError(5, "no")] * 1000), patience_seconds=2)
    for _ in range(2):
        with pytest.raises(RemoteStoreError):
            objects.get("a")
    requests = objects.connection.file_system.requests
    with pytest.raises(RemoteStoreError):
        objects.for_operation().get("a")
    assert objects.connection.file_system.requests - requests > 3, "a new operation has its own"


@pytest.mark.parametrize("errno", [22, 5])
def test_a_creation_whose_reply_is_lost_is_a_success(errno):
    file_system = Scripted()
    write = file_system.pipe_file

    def pipe_file(path, content, mode="overwrite"):
        if path in file_system.world.objects and errno == 22:  # as s3fs raises what has no name in the reply
            raise OSError(22, "Invalid argument")
        write(path, content, mode)
        if len(file_system.world.objects) == 1 and not replies:
            replies.append(1)
            raise OSError(104, "Connection reset by peer")

    replies, file_system.pipe_file = [], pipe_file
    objects = objects_of(file_system)
    assert objects.create("a", b"mine") is None
    assert objects.create("a", b"other's") == b"mine"


def test_a_bucket_that_is_missing_is_an_error_of_the_store():
    missing = Scripted(*[FileNotFoundError("The specified bucket does not exist")] * 1000)
    with pytest.raises(RemoteStoreError, match="could not be created. Received: OSError: The specified bucket"):
        objects_of(missing).create("a", b"1")
    assert objects_of(missing).get("a") is None


def test_lists_have_what_is_below_a_prefix_only():
    """s3fs names the prefix itself if it becomes one while it is listed; consoles create folders as objects."""
    file_system = Scripted()
    objects = objects_of(file_system)
    objects.put("commits/1", b"one")
    file_system.world.objects["bucket/run/commits/"] = b""
    assert objects.sizes("commits") == {"commits/1": 3}
    file_system.find = lambda path, detail: {path: {"size": 0, "type": "directory"}}
    assert objects.sizes("commits") == {}


def test_a_mistake_is_not_repeated():
    file_system = Scripted(TypeError("a bytes-like object is required"))
    with pytest.raises(TypeError):
        objects_of(file_system).put("a", b"1")


@pytest.mark.parametrize(("honours", "is_conditional"), [(True, True), (False, True), (True, False)])
def test_a_store_without_conditions_is_told(caplog, honours, is_conditional):
    file_system = FaultyFileSystem(World(honours=honours))
    objects = objects_of(file_system, is_conditional=is_conditional)
    with caplog.at_level(logging.WARNING, "tfdist"):
        objects.probe()
        objects.for_operation().probe()
    works = honours and is_conditional
    assert [record.message[:48] for record in caplog.records] == [
        "This store does not create objects only if they "
    ] * (not works)
    assert file_system.world.objects == {}
    assert objects.create("a", b"1") is None and objects.create("a", b"2") == b"1"


def test_a_program_that_exits_gives_up_soon(monkeypatch):
    ended = type("Ended", (), {"is_alive": staticmethod(lambda: False)})
    monkeypatch.setattr(remote_requests.threading, "main_thread", lambda: ended)
    objects = objects_of(Scripted(*[OSError(5, "no")] * 1000))
    with pytest.raises(RemoteStoreError):
        objects.get("a")
    assert objects.clock() <= remote_requests._PATIENCE_AT_EXIT_SECONDS
    closed = Scripted(RuntimeError("cannot schedule new futures after shutdown"))
    with pytest.raises(RemoteStoreError):
        objects_of(closed).get("a")
    assert closed.requests == 1


def test_a_process_that_forks_connects_again(monkeypatch):
    connection, path = connect_store("memory://bucket/run/")
    assert path == "/bucket/run"
    first = connection.file_system
    assert connection.file_system is first
    monkeypatch.setattr(remote_requests.os, "getpid", lambda: -1)
    assert connection.file_system is not first


def test_a_library_that_is_missing_is_named(monkeypatch):
    import fsspec

    def missing(protocol):
        raise ImportError(f"Install {protocol}fs")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ImportError, match=r"The library for s3:// is not installed. .* pip install 'tfdist\[remote\]'"):
        connect_store("s3://bucket/run")


def test_a_server_that_never_replies_ends_a_request(monkeypatch):
    """s3fs itself waits for ever: a time-out of its settings ends requests that read, but none that writes."""
    require("s3fs")
    monkeypatch.setattr(remote_requests, "_SHORTEST_REQUEST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, as a kernel does
        server = S3Server(f"http://127.0.0.1:{silent.getsockname()[1]}")
        objects = server.objects("worker", "run", patience_seconds=0.1)
        with pytest.raises(RemoteStoreError, match=r"could not be written. Received: .*Timeout"):
            objects.put("a", b"1")
