"""Files that workers write into a checkpoint: they are part of its manifest, or the save fails."""

import json
from dataclasses import replace

import pytest

from tfdist.checkpoint import CheckpointError, CheckpointStore, Shard, sharded_save
from tfdist.checkpoint.checkpoint import Checkpoint
from tfdist.checkpoint.errors import CorruptCheckpointError
from tfdist.checkpoint.manifest import Manifest

INDEX, DATA = "worker-1.index", "worker-1.data-00000-of-00001"


class Written:
    """Worker files of which some are not written where they are expected."""

    size_bytes = 3

    def __init__(self, size=3, error=None):
        self.size, self.error = size, error

    def write(self, directory):
        assert directory.is_absolute()
        (directory / INDEX).write_bytes(b"index")
        (directory / DATA).write_bytes(b"abc"[: self.size])
        if self.error is not None:
            raise self.error
        return {INDEX: None, DATA: 3}


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path)


def save(store, sequence, files=None):
    shards = {"rank_shard": Shard({}), "shared_shard": Shard({})}
    return store.save(sequence, "a", rank=0, num_ranks=1, **shards, metadata={}, worker_files=files)


def test_they_are_in_the_manifest_and_verified(store, tmp_path):
    path = save(store, 1, Written()).path
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["format"] == 4 and manifest["files"][DATA]["size_bytes"] == 3
    assert [info.status for info in store.list_checkpoints(verify_checksums=True)] == ["complete"]
    (path / DATA).write_bytes(b"abd")
    assert [info.status for info in store.list_checkpoints()] == ["complete"]  # of sizes
    assert store.newest() == (None, [f"{path.name}: {DATA} is not what was written: its checksum differs"])
    (path / INDEX).unlink()
    assert "worker-1.index is missing" in store.newest()[1][0]


def test_a_checkpoint_without_them_can_be_read_by_earlier_versions(store):
    assert json.loads((save(store, 1).path / "manifest.json").read_bytes())["format"] == 3


@pytest.mark.parametrize("name", ["notes.txt", "rank-1.safetensors", "../worker-1.index"])
def test_a_manifest_with_other_files_is_corrupt(store, name):
    path = save(store, 1).path
    manifest = Manifest.from_bytes((path / "manifest.json").read_bytes())
    files = {**manifest.files, name: next(iter(manifest.files.values()))}
    (path / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())
    with pytest.raises(CorruptCheckpointError, match="does not name the files of 1 ranks"):
        Checkpoint(path)


def test_a_file_that_this_process_does_not_see_is_an_error(store, monkeypatch):
    monkeypatch.setattr(sharded_save, "_VISIBLE_WITHIN_SECONDS", 0.1)
    save(store, 1, Written())
    with pytest.raises(CheckpointError, match=f"does not see what .*Received: {DATA} of 2 bytes"):
        save(store, 2, Written(size=2))
    assert [info.sequence for info in store.list_checkpoints(verify_checksums=True)] == [1]


def test_a_worker_that_fails_leaves_no_checkpoint(store):
    save(store, 1, Written())
    with pytest.raises(CheckpointError, match="lost"):
        save(store, 2, Written(error=CheckpointError("A worker was lost")))
    assert [(info.sequence, info.status) for info in store.list_checkpoints()] == [(1, "complete")]


def test_their_size_counts_for_the_space_on_the_disk(store, monkeypatch):
    files = Written()
    files.size_bytes = 10**18
    with pytest.raises(CheckpointError, match="Not enough disk space for checkpoint 1"):
        save(store, 1, files)
