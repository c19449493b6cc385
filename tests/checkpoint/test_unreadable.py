"""Files that cannot be read: a damaged one makes a checkpoint broken, a file system that does not answer does not."""

import errno
import functools
import os
import types

import pytest

from tfdist.checkpoint import CheckpointError, CheckpointStore, checkpoint, file_record


@pytest.fixture
def store(tmp_path, save):
    """Two checkpoints."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    return store


@pytest.fixture
def sick(monkeypatch):
    """Has reading a file of checkpoint 2 fail."""

    def make(number, name):
        def fail(path):
            if path.name == name and path.parent.name.endswith("2"):
                raise OSError(number, os.strerror(number))

        of, read = file_record.FileRecord.of, checkpoint.Path.read_bytes
        monkeypatch.setattr(file_record.FileRecord, "of", lambda path: (fail(path), of(path))[1])
        monkeypatch.setattr(checkpoint.Path, "read_bytes", lambda path: (fail(path), read(path))[1])
        stat = types.SimpleNamespace(stat=lambda path: (fail(path), os.stat(path))[1])
        monkeypatch.setattr(checkpoint, "os", stat)

    return make


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors"])
def test_what_the_disk_cannot_read_is_broken(store, sick, whole, name):
    sick(errno.EIO, name)
    found, passed_over = store.newest()
    whole(found, 1)
    assert len(passed_over) == 1 and f"ckpt-0000000002: {name} cannot be read: " in passed_over[0]
    assert [entry.status for entry in store.entries(every_byte=True)] == ["whole", "broken"]


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN])
def test_a_file_system_that_does_not_answer_breaks_nothing(store, sick, save, number, name):
    sick(number, name)
    listing = functools.partial(store.entries, every_byte=True)
    for call in (store.newest, listing, lambda: store.open(2), lambda: store.prune(1), lambda: save(store, 2)):
        with pytest.raises(CheckpointError, match="could not be .*Received: .*Expected: .*[Ss]tart"):
            call()
    assert sorted(path.name for path in store.directory.iterdir()) == ["ckpt-0000000001", "ckpt-0000000002"]
