"""What a store keeps and removes: a corrupt checkpoint never displaces a complete one."""

import pytest

from tfdist.checkpoint import CheckpointStore
from tfdist.checkpoint import checkpoint_store as store_module


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "a" / "store")


def names(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_the_newest_are_kept(store, save, assert_complete):
    keeping = CheckpointStore(store.directory, keep=2)
    for sequence in range(1, 5):
        save(keeping, sequence)
        kept = list(range(max(1, sequence - 1), sequence + 1))
        assert [entry.sequence for entry in store.list_checkpoints()] == kept
    assert_complete(store.open(3), 3)


def test_only_what_this_start_wrote_or_verified_counts_as_kept(store, save):
    for sequence in (1, 2, 3):
        save(store, sequence)
    (store.directory / "ckpt-0000000003" / "shared.safetensors").write_bytes(b"")
    restarted = CheckpointStore(store.directory, keep=2)
    assert restarted.newest()[0].sequence == 2
    save(restarted, 4)  # 2 was verified, 4 written: what is older than 2 goes, the corrupt 3 counts for nothing
    assert [entry.sequence for entry in store.list_checkpoints()] == [2, 3, 4]
    save(restarted, 5)
    assert [entry.sequence for entry in store.list_checkpoints()] == [4, 5]


def test_a_corrupt_one_never_displaces_a_complete_one(store, save):
    for sequence in (1, 2, 3, 4):
        save(CheckpointStore(store.directory, keep=9), sequence)
    for sequence in (3, 4):
        (store.directory / f"ckpt-{sequence:010d}" / "manifest.json").unlink()
    restarted = CheckpointStore(store.directory, keep=2)
    save(restarted, 5)
    assert [entry.sequence for entry in store.list_checkpoints()] == [1, 2, 3, 4, 5]


def test_what_other_processes_removed_is_not_counted(store, save):
    keeping = CheckpointStore(store.directory, keep=2)
    for sequence in (1, 2, 3):
        save(CheckpointStore(store.directory, keep=9), sequence)
    keeping.open(3)
    keeping.open(2)
    for file in (store.directory / "ckpt-0000000003").iterdir():
        file.unlink()
    (store.directory / "ckpt-0000000003").rmdir()
    save(keeping, 4)
    assert [entry.sequence for entry in store.list_checkpoints()] == [2, 4]


def test_unfinished_saves_of_other_attempts_are_removed(store, save, assert_complete):
    save(store, 1)
    for sequence, attempt in ((2, "first"), (2, "second"), (3, "second"), (2, "a-second")):
        save(store, sequence, num_ranks=2, attempt=attempt, ranks=[1])
    (store.directory / ".removed-ckpt-0000000000-abcd").mkdir()
    (store.directory / "notes.txt").write_text("mine")
    (store.directory / ".unfinished-7").mkdir()
    assert [entry.status for entry in store.list_checkpoints()].count("unfinished") == 5
    store.remove_unfinished("second")
    mine = [".unfinished-7", "ckpt-0000000001", "notes.txt"]
    assert names(store) == sorted([".unfinished-0000000002-second", ".unfinished-0000000003-second", *mine])
    store.remove_unfinished()
    assert names(store) == mine
    assert_complete(store.newest()[0], 1)


def test_a_save_removes_what_earlier_ones_left(store, save):
    save(store, 2, num_ranks=2, attempt="first", ranks=[1])
    save(store, 5, num_ranks=2, attempt="first", ranks=[1])
    save(store, 3, attempt="first")
    assert names(store) == [".unfinished-0000000005-first", "ckpt-0000000003"]


def test_prune(store, save, assert_complete):
    for sequence in range(1, 7):
        save(CheckpointStore(store.directory, keep=9), sequence, num_ranks=2)
    torn = store.directory / "ckpt-0000000005" / "rank-1.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1] + b"\xff")  # of the right size
    (store.directory / "ckpt-0000000001" / "manifest.json").write_text("{}")
    save(store, 7, num_ranks=2, ranks=[1])
    (store.directory / "notes.txt").write_text("mine")
    going = [".unfinished-0000000007-a", *(f"ckpt-000000000{number}" for number in (1, 2, 3, 5))]
    before = names(store)
    assert [path.name for path in store.prune(2, dry_run=True)] == going
    assert names(store) == before
    assert [path.name for path in store.prune(2)] == going
    assert names(store) == ["ckpt-0000000004", "ckpt-0000000006", "notes.txt"]
    assert_complete(store.open(4), 4, 2)
    assert_complete(store.open(6), 6, 2)
    assert store.prune(2) == []


def test_prune_keeps_corrupt_ones_if_none_is_complete(store, save):
    save(store, 1).path.joinpath("manifest.json").write_text("{}")
    save(store, 2, num_ranks=2, ranks=[1])
    assert [path.name for path in store.prune(1)] == [".unfinished-0000000002-a"]
    assert names(store) == ["ckpt-0000000001"]


def test_one_that_is_removed_while_others_are_verified_is_not_corrupt(store, save, monkeypatch):
    """A training saves meanwhile."""
    keeping, look = CheckpointStore(store.directory, keep=2), store_module.inspect_checkpoint

    def inspect_slowly(sequence, path, *, verify_checksums):
        found = look(sequence, path, verify_checksums=verify_checksums)
        if sequence == 2:
            save(keeping, 3)
        return found

    save(keeping, 1)
    save(keeping, 2)
    monkeypatch.setattr(store_module, "inspect_checkpoint", inspect_slowly)
    assert [(found.sequence, found.status) for found in store.list_checkpoints(verify_checksums=True)] == [
        (2, "complete")
    ]
