"""The store: what was saved comes back, only whole checkpoints count, and arguments are looked at."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tfdist.checkpoint import CheckpointError, CheckpointStore, Shard, manifest, receipts, saving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "a" / "store")


def names(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_an_empty_store(store):
    assert store.newest() == (None, [])
    assert store.entries() == []
    store.clean()
    assert store.prune(1) == []
    assert not store.directory.exists()
    with pytest.raises(CheckpointError, match=r"Checkpoint 3 is not whole. Received: manifest.json is missing.* none;"):
        store.open(3)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_rank_gets_back_what_it_saved(store, save, whole, world):
    before = time.time()
    saved = save(store, 7, world=world)
    whole(saved, 7, world)
    assert names(store) == ["ckpt-0000000007"]
    files = ["manifest.json", *(f"rank-{rank}.safetensors" for rank in range(world)), "shared.safetensors"]
    assert sorted(os.listdir(saved.path)) == files
    newest, passed_over = CheckpointStore(store.directory).newest()
    whole(newest, 7, world)
    assert passed_over == []
    whole(CheckpointStore(store.directory).open(7), 7, world)
    (entry,) = store.entries(every_byte=True)
    assert (entry.sequence, entry.path, entry.status, entry.reason) == (7, saved.path, "whole", "")
    assert (entry.world, entry.facts) == (world, {"step": 700, "epoch": 7})
    assert before <= entry.saved_at <= time.time()
    assert entry.size_bytes == sum(file.stat().st_size for file in saved.path.iterdir()) > saved.size_bytes > 0


def test_processes_save_together(store, whole):
    program = """
import sys
from conftest import make_shard
from tfdist.checkpoint import CheckpointStore
directory, rank = sys.argv[1], int(sys.argv[2])
shared = make_shard(4, None) if rank == 0 else None
facts = {"step": 400, "epoch": 4} if rank == 0 else {}
CheckpointStore(directory).save(4, "a", rank=rank, world=3, own=make_shard(4, rank), shared=shared, facts=facts)
"""
    path = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
    commands = [[sys.executable, "-c", program, str(store.directory), str(rank)] for rank in range(3)]
    processes = [subprocess.Popen(command, env={"PYTHONPATH": path}) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    whole(store.newest()[0], 4, 3)


def test_the_newest_is_that_of_the_highest_number(store, save, whole):
    for sequence in (9, 10, 2):
        save(store, sequence)
    whole(store.newest()[0], 10)
    whole(store.open(2), 2)
    assert [entry.sequence for entry in store.entries()] == [2, 9, 10]


def test_a_checkpoint_knows_its_ranks(store, save):
    saved = save(store, 1, world=2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"Received: {rank}. Expected: 0 to 1"):
            saved.of_rank(rank)


def test_a_file_that_changes_after_it_was_verified_is_found(store, save, whole):
    save(store, 1)
    checkpoint = store.open(1)
    file = checkpoint.path / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="rank-0.safetensors is not what was written: its checksum differs"):
        checkpoint.of_rank(0)
    file.unlink()
    with pytest.raises(CheckpointError, match="rank-0.safetensors is missing"):
        checkpoint.of_rank(0)
    checkpoint.shared()


def test_leftovers_of_attempts_are_never_mixed(store, save, whole):
    with pytest.raises(CheckpointError):
        save(CheckpointStore(store.directory, peer_timeout_seconds=0), 5, world=2, attempt="first", ranks=[0])
    save(store, 5, world=2, attempt="second", ranks=[1])
    with pytest.raises(CheckpointError, match="Rank 1 has not written"):
        save(CheckpointStore(store.directory, peer_timeout_seconds=0), 5, world=2, attempt="third", ranks=[0])
    with pytest.raises(CheckpointError, match="Rank 1 has not written"):
        save(CheckpointStore(store.directory, peer_timeout_seconds=0), 6, world=2, attempt="second", ranks=[0])
    save(store, 5, world=2, attempt="fourth")
    whole(store.newest()[0], 5, 2)


def test_missing_ranks_are_named(store, save, whole):
    save(store, 1, world=4)
    hasty = CheckpointStore(store.directory, peer_timeout_seconds=0.01)
    with pytest.raises(CheckpointError, match=r"Ranks 1, 3 have not written .* within 0.01 s. .* peer_timeout_seconds"):
        save(hasty, 2, world=4, ranks=[0, 2])
    assert names(store) == ["ckpt-0000000001"]
    whole(store.newest()[0], 1, 4)


def test_the_failure_of_a_rank_is_told_at_once(store, save, whole, monkeypatch):
    save(store, 1, world=3)
    write = saving.container.write

    def fail(path, encoded):
        if path.name == "rank-2.safetensors":
            path.write_text("half of it")
            raise OSError(28, "No space left on device")
        write(path, encoded)

    monkeypatch.setattr(saving.container, "write", fail)
    patient = CheckpointStore(store.directory, peer_timeout_seconds=3600)
    with pytest.raises(CheckpointError, match="Rank 2 could not write its part .* No space left on device"):
        save(patient, 2, world=3)
    assert (
        names(store) == ["ckpt-0000000001"] or not (store.directory / names(store)[0] / "rank-2.safetensors").exists()
    )
    monkeypatch.undo()
    whole(store.newest()[0], 1, 3)
    save(patient, 3, world=3)
    whole(store.newest()[0], 3, 3)


def test_a_rank_that_fails_removes_its_file_and_raises_too(store, save, monkeypatch):
    def fail(directory, rank, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(receipts, "write", fail)
    with pytest.raises(CheckpointError, match=r"Checkpoint 2 could not be written. Received: .* No space left"):
        save(store, 2, world=2, ranks=[1])
    (left,) = store.directory.iterdir()
    assert [path.name for path in left.iterdir()] == ["rank-1.receipt"]


def test_a_whole_checkpoint_is_never_replaced(store, save, whole):
    save(store, 2)
    with pytest.raises(CheckpointError, match=r"There is a checkpoint of this number. Received: sequence=2"):
        save(store, 2, attempt="b")
    assert names(store) == ["ckpt-0000000002"]
    whole(store.newest()[0], 2)


def test_a_broken_checkpoint_is_replaced(store, save, whole):
    save(store, 1)
    (save(store, 2).path / "shared.safetensors").unlink()
    save(store, 2, attempt="b")
    whole(store.newest()[0], 2)
    assert names(store) == ["ckpt-0000000001", "ckpt-0000000002"]


def test_a_rank_saves_a_number_once_in_an_attempt(store, save):
    save(store, 2, world=2, ranks=[1])
    with pytest.raises(
        ValueError, match=r"Rank 1 saves checkpoint 2 a second time in one attempt. Received: attempt='a'"
    ):
        save(store, 2, world=2, ranks=[1])
    assert names(store) == [".unfinished-0000000002-a"]


def test_another_format_is_an_error_before_anything_is_read(store, save, whole, monkeypatch):
    save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 3)
        later = save(CheckpointStore(store.directory), 2).path
    for file in later.glob("*.safetensors"):
        file.unlink()
    for call in (store.newest, lambda: store.open(2), lambda: save(store, 2, attempt="b")):
        with pytest.raises(CheckpointError, match="written by another version of tfdist. Received: format 3. Expected"):
            call()
    assert [entry.status for entry in store.entries()] == ["whole", "other format"]
    assert store.prune(1) == [] and later.exists()
    whole(store.open(1), 1)


def test_a_checkpoint_under_another_number_is_broken(store, save):
    save(store, 1).path.rename(store.directory / "ckpt-0000000005")
    assert store.newest() == (None, ["ckpt-0000000005: manifest.json is that of checkpoint 1"])


GOOD = {"sequence": 1, "attempt": "a", "rank": 0, "world": 1, "own": Shard({}), "shared": Shard({}), "facts": {}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sequence": -1}, "The number is wrong. Received: sequence=-1. Expected: 0 to 9999999999"),
        ({"sequence": 10**10}, "Received: sequence=10000000000"),
        ({"attempt": ""}, "The name of the attempt is wrong. Received: attempt=''"),
        ({"attempt": "../a"}, "Received: attempt='../a'"),
        ({"attempt": "a/b"}, "Received: attempt='a/b'"),
        ({"attempt": "a" * 101}, "The name of the attempt"),
        ({"rank": 1}, "The rank is wrong. Received: rank=1, world=1"),
        ({"rank": -1}, "The rank is wrong"),
        ({"world": 0}, "The rank is wrong"),
        ({"shared": None}, "Received: shared=None from rank 0. Expected: a shard from rank 0, None from the others"),
        ({"rank": 1, "world": 2}, "Received: shared=a shard from rank 1"),
        ({"facts": {"a": np.float32(1)}}, "The facts of a checkpoint cannot be written as JSON"),
        (
            {"own": Shard({"a": np.array(["text"])})},
            "A tensor of a checkpoint cannot be written. Received: 'a' of dtype <U4",
        ),
        ({"own": Shard({}, {"a": {1}})}, "The notes of a checkpoint cannot be written as JSON"),
    ],
)
def test_wrong_arguments(store, changed, message):
    arguments = {**GOOD, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        store.save(arguments.pop("sequence"), arguments.pop("attempt"), **arguments)
    assert not store.directory.exists()


@pytest.mark.parametrize(
    "options", [{"keep": 0}, {"peer_timeout_seconds": -1.0}, {"peer_timeout_seconds": float("nan")}]
)
def test_wrong_options(tmp_path, options):
    with pytest.raises(ValueError, match=r"Received: \w+=.*\. Expected"):
        CheckpointStore(tmp_path, **options)
    with pytest.raises(ValueError, match=r"Received: keep=0. Expected"):
        CheckpointStore(tmp_path).prune(0)
