"""Checkpoints in memory: the same promises, in memory that is used again."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_hosts import Training, assert_is

from tfdist.checkpoint import CheckpointError, Shard, sharded_save
from tfdist.host_storage import memory_store
from tfdist.host_storage.memory_store import MemoryStore


@pytest.fixture
def train():
    """Starts a training after the end of the one before."""
    started = []

    def start(directories, attempt="a", **options):
        if started:
            started.pop().end()
        started.append(Training(directories, attempt, MemoryStore, **options))
        return started[-1]

    yield start
    for training in started:
        training.end()


@pytest.fixture(params=[1, 2], ids=["one host", "two hosts"])
def memories(request, tmp_path):
    """The memory of each of two workers."""
    return [tmp_path / "run" / "ab"[worker % request.param] for worker in range(2)]


def files_in(memories):
    return {path.stat().st_ino: path for memory in set(memories) for path in memory.rglob("*.safetensors")}


def test_the_memory_of_the_save_before_the_last_is_used_again(memories, train):
    training = train(memories)
    for sequence in (1, 2):
        training.save(sequence)
    present = files_in(memories)
    for sequence in range(3, 6):
        saved = training.save(sequence)
        assert files_in(memories).keys() == present.keys()
        assert_is(saved, sequence, "a", 2)
    for memory in memories:
        assert [info.sequence for info in MemoryStore(memory).list_checkpoints(verify_checksums=True)] == [5]


def test_memory_that_is_used_again_counts_as_free(memories, train, monkeypatch):
    training = train(memories[:1])
    for sequence in (1, 2):
        training.save(sequence)
    reserve = sharded_save._RESERVE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=reserve))
    training.save(3)
    shutil.rmtree(memories[0] / "spare")
    with pytest.raises(CheckpointError, match="Not enough disk space for checkpoint 4"):
        training.save(4)


def test_what_is_shorter_than_before_is_complete(memories, train):
    """A part that shrinks, as a log does, leaves nothing of the longer one."""
    store = train(memories[:1]).stores[0]
    for sequence, size in enumerate((1000, 1000, 3, 2000, 0)):
        shard = Shard({"values": np.arange(size)})
        store.save(sequence, "a", rank=0, num_ranks=1, rank_shard=shard, shared_shard=shard, metadata={})
        checkpoint, skipped = MemoryStore(memories[0]).newest()
        assert skipped == [] and checkpoint.read_shared().tensors["values"].tolist() == list(range(size))


def test_nothing_is_written_to_the_arrays_of_what_was_restored(memories, train):
    train(memories).save(1)
    training = train(memories, "b")
    restored = training.restore()
    shards = [shard for found in restored for shard in (found.read_shared(), found.read_rank(0))]
    before = [shard.tensors["values"].copy() for shard in shards]
    for sequence in range(2, 6):
        training.save(sequence)
    for shard, values in zip(shards, before, strict=True):
        np.testing.assert_array_equal(shard.tensors["values"], values)


class _Killed(OSError):
    pass


@pytest.mark.parametrize("writes", range(3))
def test_a_writer_that_is_killed_leaves_the_newest(memories, train, writes, monkeypatch):
    write, left = MemoryStore._write, []

    def die(store, path, parts):
        checksum = write(store, path, parts)
        left.append(left.pop() - 1 if left else 99)
        if left[0] < 0:
            raise _Killed
        return checksum

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "_write", die)
        training = train(memories, peer_timeout_seconds=0.5)
        for sequence in (1, 2, 3):
            training.save(sequence)
        left[:] = [writes]
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process cleans up nothing
        with pytest.raises((_Killed, CheckpointError)):
            training.save(4)
    later = train(memories, "b")
    for checkpoint in later.restore():
        assert_is(checkpoint, 3, "a", 2)
    later.save(4)
    assert_is(train(memories, "c").restore()[1], 4, "b", 2)


def test_a_host_without_memory_gets_that_of_others(tmp_path, train):
    memories = [tmp_path / "run" / name for name in "abc"]
    train(memories).save(1)
    shutil.rmtree(memories[1])
    shutil.rmtree(memories[2])
    for checkpoint in train(memories, "b").restore():
        assert_is(checkpoint, 1, "a", 3)


def test_what_is_forgotten_is_not_restored(memories, train):
    training = train(memories)
    training.save(1)
    training.save(2)
    for store in training.stores:
        if store.leads:
            store.clear()
    assert train(memories, "b").restore() == [None, None]
    assert len(files_in(memories)) == 3 * len(set(memories)), "the memory is used again"


def test_the_memory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_store.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(CheckpointError, match="The memory of this run is another user's. Received: .*run'"):
        MemoryStore(tmp_path / "run" / "a")


def test_memory_that_is_freed_takes_nothing_of_the_next_fit(memories, train, monkeypatch):
    """Another worker of the host may be there already."""
    training, begun = train(memories), memories[1] / "of the next fit"
    training.save(1)
    rmtree = shutil.rmtree

    def begin_and_remove(path, *arguments, **options):
        begun.parent.mkdir(exist_ok=True)
        begun.touch()
        rmtree(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", begin_and_remove)
    for store in training.stores:
        if store.leads and store.directory == memories[1]:
            store.remove()
    assert [path.name for path in memories[1].iterdir()] == ["of the next fit"]
    assert not list(memories[1].parent.glob(".removed-*"))
