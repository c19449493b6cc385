"""The store: what was saved is read back, only complete checkpoints count, and arguments are checked."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tfdist.checkpoint import CheckpointError, CheckpointStore, Shard, manifest, sharded_save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "a" / "store")


def names(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_an_empty_store(store):
    assert store.newest() == (None, [])
    assert store.list_checkpoints() == []
    store.remove_unfinished()
    assert store.prune(1) == []
    assert not store.directory.exists()
    with pytest.raises(CheckpointError, match=r"Checkpoint 3 is corrupt. Received: manifest.json is missing.* none;"):
        store.open(3)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_rank_gets_back_what_it_saved(store, save, assert_complete, num_ranks):
    before = time.time()
    saved = save(store, 7, num_ranks=num_ranks)
    assert_complete(saved, 7, num_ranks)
    assert names(store) == ["ckpt-0000000007"]
    files = ["manifest.json", *(f"rank-{rank}.safetensors" for rank in range(num_ranks)), "shared.safetensors"]
    assert sorted(os.listdir(saved.path)) == files
    newest, skipped = CheckpointStore(store.directory).newest()
    assert_complete(newest, 7, num_ranks)
    assert skipped == []
    assert_complete(CheckpointStore(store.directory).open(7), 7, num_ranks)
    (entry,) = store.list_checkpoints(verify_checksums=True)
    assert (entry.sequence, entry.path, entry.status, entry.reason) == (7, saved.path, "complete", "")
    assert (entry.num_ranks, entry.metadata) == (num_ranks, {"step": 700, "epoch": 7})
    assert before <= entry.saved_at <= time.time()
    assert entry.size_bytes == sum(file.stat().st_size for file in saved.path.iterdir()) > saved.size_bytes > 0


def test_processes_save_together(store, assert_complete):
    program = """
import sys
from conftest import make_shard
from tfdist.checkpoint import CheckpointStore
directory, rank = sys.argv[1], int(sys.argv[2])
shards = {"rank_shard": make_shard(4, rank), "shared_shard": make_shard(4, None) if rank == 0 else None}
metadata = {"step": 400, "epoch": 4} if rank == 0 else {}
CheckpointStore(directory).save(4, "a", rank=rank, num_ranks=3, **shards, metadata=metadata)
"""
    path = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
    commands = [[sys.executable, "-c", program, str(store.directory), str(rank)] for rank in range(3)]
    processes = [subprocess.Popen(command, env={"PYTHONPATH": path}) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert_complete(store.newest()[0], 4, 3)


def test_the_newest_is_that_of_the_highest_number(store, save, assert_complete):
    for sequence in (9, 10, 2):
        save(store, sequence)
    assert_complete(store.newest()[0], 10)
    assert_complete(store.open(2), 2)
    assert [entry.sequence for entry in store.list_checkpoints()] == [2, 9, 10]


def test_a_checkpoint_knows_its_ranks(store, save):
    saved = save(store, 1, num_ranks=2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"Received: {rank}. Expected: 0 to 1"):
            saved.read_rank(rank)


def test_a_file_that_changes_after_it_was_verified_is_found(store, save, assert_complete):
    save(store, 1)
    checkpoint = store.open(1)
    file = checkpoint.path / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="rank-0.safetensors is not what was written: its checksum differs"):
        checkpoint.read_rank(0)
    file.unlink()
    with pytest.raises(CheckpointError, match="rank-0.safetensors is missing"):
        checkpoint.read_rank(0)
    checkpoint.read_shared()


def test_leftovers_of_attempts_are_never_mixed(store, save, assert_complete):
    with pytest.raises(CheckpointError):
        save(CheckpointStore(store.directory, peer_timeout_seconds=0), 5, num_ranks=2, attempt="first", ranks=[0])
    save(store, 5, num_ranks=2, attempt="second", ranks=[1])
    with pytest.raises(CheckpointError, match="Rank 1 has not written"):
        save(CheckpointStore(store.directory, peer_timeout_seconds=0), 5, num_ranks=2, attempt="third", ranks=[0])
    with pytest.raises(CheckpointError, match="Rank 1 has not written"):
        save(CheckpointStore(store.directory, peer_timeout_seconds=0), 6, num_ranks=2, attempt="second", ranks=[0])
    save(store, 5, num_ranks=2, attempt="fourth")
    assert_complete(store.newest()[0], 5, 2)


def test_missing_ranks_are_named(store, save, assert_complete):
    save(store, 1, num_ranks=4)
    hasty = CheckpointStore(store.directory, peer_timeout_seconds=0.01)
    save(hasty, 2, num_ranks=4, ranks=[2])
    with pytest.raises(CheckpointError, match=r"Ranks 1, 3 have not written .* within 0.01 s. .* peer_timeout_seconds"):
        save(hasty, 2, num_ranks=4, ranks=[0])
    assert names(store) == ["ckpt-0000000001"]
    assert_complete(store.newest()[0], 1, 4)


def test_the_failure_of_a_rank_is_reported_at_once(store, save, assert_complete, monkeypatch):
    save(store, 1, num_ranks=3)
    write = sharded_save.write_shard

    def fail(path, encoded, file_writer):
        if path.name == "rank-2.safetensors":
            path.write_text("half of it")
            raise OSError(28, "No space left on device")
        return write(path, encoded, file_writer)

    monkeypatch.setattr(sharded_save, "write_shard", fail)
    patient = CheckpointStore(store.directory, peer_timeout_seconds=3600)
    with pytest.raises(CheckpointError, match="Rank 2 could not write its part .* No space left on device"):
        save(patient, 2, num_ranks=3)
    assert (
        names(store) == ["ckpt-0000000001"] or not (store.directory / names(store)[0] / "rank-2.safetensors").exists()
    )
    monkeypatch.undo()
    assert_complete(store.newest()[0], 1, 3)
    save(patient, 3, num_ranks=3)
    assert_complete(store.newest()[0], 3, 3)


def test_a_rank_whose_part_cannot_be_encoded_is_not_waited_for(store, save, monkeypatch):
    encode = sharded_save.encode_shard

    def fail(shard):
        if shard.metadata["rank"] == 2:
            raise ValueError("A part of the state cannot be saved.")
        return encode(shard)

    monkeypatch.setattr(sharded_save, "encode_shard", fail)
    patient = CheckpointStore(store.directory, peer_timeout_seconds=3600)
    with pytest.raises(CheckpointError, match="Rank 2 could not write its part .* A part of the state cannot be saved"):
        save(patient, 2, num_ranks=3)


def test_a_rank_that_fails_removes_its_file_and_raises_too(store, save, monkeypatch):
    def fail(directory, rank, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharded_save, "write_receipt", fail)
    with pytest.raises(CheckpointError, match=r"Checkpoint 2 could not be written. Received: .* No space left"):
        save(store, 2, num_ranks=2, ranks=[1])
    (left,) = store.directory.iterdir()
    assert [path.name for path in left.iterdir()] == ["rank-1.receipt"]


def test_a_complete_checkpoint_is_never_replaced(store, save, assert_complete):
    save(store, 2)
    with pytest.raises(CheckpointError, match=r"A checkpoint with this number exists. Received: sequence=2"):
        save(store, 2, attempt="b")
    assert names(store) == ["ckpt-0000000002"]
    assert_complete(store.newest()[0], 2)


def test_a_corrupt_checkpoint_is_replaced(store, save, assert_complete):
    save(store, 1)
    (save(store, 2).path / "shared.safetensors").unlink()
    save(store, 2, attempt="b")
    assert_complete(store.newest()[0], 2)
    assert names(store) == ["ckpt-0000000001", "ckpt-0000000002"]


def test_a_rank_saves_a_number_once_in_an_attempt(store, save):
    save(store, 2, num_ranks=2, ranks=[1])
    with pytest.raises(ValueError, match=r"Rank 1 saves checkpoint 2 a second time.* Received: attempt='a'"):
        save(store, 2, num_ranks=2, ranks=[1])
    assert names(store) == [".unfinished-0000000002-a"]


def test_another_format_is_an_error_before_anything_is_read(store, save, assert_complete, monkeypatch):
    save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 7)
        later = save(CheckpointStore(store.directory), 2).path
    for file in later.glob("*.safetensors"):
        file.unlink()
    for call in (store.newest, lambda: store.open(2), lambda: save(store, 2, attempt="b")):
        with pytest.raises(CheckpointError, match="written by another version of tfdist. Received: format 7. Expected"):
            call()
    assert [entry.status for entry in store.list_checkpoints()] == ["complete", "other format"]
    assert store.prune(1) == [] and later.exists()
    assert_complete(store.open(1), 1)


def test_a_save_that_ends_while_it_is_listed(store, save, monkeypatch):
    """It gets its final name after its directory has been found and before that is read."""
    save(store, 1)
    save(store, 2, num_ranks=2, ranks=[1])
    unfinished, scandir = store.directory / ".unfinished-0000000002-a", os.scandir

    def end_before(path="."):
        if Path(path) == unfinished:
            unfinished.rename(store.directory / "ckpt-0000000002")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", end_before)
    found = [(entry.sequence, entry.status) for entry in store.list_checkpoints()]
    assert found == [(1, "complete"), (2, "unfinished")] and not unfinished.exists()


def test_a_checkpoint_under_another_number_is_corrupt(store, save):
    save(store, 1).path.rename(store.directory / "ckpt-0000000005")
    assert store.newest() == (None, ["ckpt-0000000005: manifest.json is that of checkpoint 1"])


GOOD = {
    "sequence": 1,
    "attempt": "a",
    "rank": 0,
    "num_ranks": 1,
    "rank_shard": Shard({}),
    "shared_shard": Shard({}),
    "metadata": {},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sequence": -1}, "Invalid sequence number. Received: sequence=-1. Expected: 0 to 9999999999"),
        ({"sequence": 10**10}, "Received: sequence=10000000000"),
        ({"attempt": ""}, "Invalid name of the attempt. Received: attempt=''"),
        ({"attempt": "../a"}, "Received: attempt='../a'"),
        ({"attempt": "a/b"}, "Received: attempt='a/b'"),
        ({"attempt": "a" * 101}, "Invalid name of the attempt"),
        ({"rank": 1}, "Invalid rank. Received: rank=1, num_ranks=1"),
        ({"rank": -1}, "Invalid rank"),
        ({"num_ranks": 0}, "Invalid rank"),
        (
            {"shared_shard": None},
            "Received: shared_shard=None from rank 0. Expected: a shard from rank 0, None from the others",
        ),
        ({"rank": 1, "num_ranks": 2}, "Received: shared_shard=a shard from rank 1"),
        ({"metadata": {"a": np.float32(1)}}, "The metadata of a checkpoint cannot be written as JSON"),
        (
            {"rank_shard": Shard({"a": np.array(["text"])})},
            "A tensor of a checkpoint cannot be written. Received: 'a' of dtype <U4",
        ),
        ({"rank_shard": Shard({}, {"a": {1}})}, "The metadata of a checkpoint cannot be written as JSON"),
    ],
)
def test_wrong_arguments(store, changed, message):
    arguments = {**GOOD, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        store.save(arguments.pop("sequence"), arguments.pop("attempt"), **arguments)
    assert not store.directory.exists()


@pytest.mark.parametrize("keep", [0, -1, 2.5, 2.0, True, float("nan"), "3", None])
def test_wrong_keep(tmp_path, keep):
    message = re.escape(f"Invalid `keep`. Received: keep={keep!r}. Expected: a whole number of at least 1.")
    with pytest.raises(ValueError, match=message):
        CheckpointStore(tmp_path, keep=keep)
    with pytest.raises(ValueError, match=message):
        CheckpointStore(tmp_path).prune(keep)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), True, "60", None])
def test_wrong_peer_timeout(tmp_path, seconds):
    message = re.escape(f"Invalid `peer_timeout_seconds`. Received: peer_timeout_seconds={seconds!r}. Expected: ")
    with pytest.raises(ValueError, match=message):
        CheckpointStore(tmp_path, peer_timeout_seconds=seconds)
