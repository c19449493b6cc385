"""What a store keeps and removes: never a whole checkpoint for the sake of a broken one."""

import pytest

from tfdist.checkpoint import CheckpointStore, entry


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "a" / "store")


def names(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_the_newest_are_kept(store, save, whole):
    keeping = CheckpointStore(store.directory, keep=2)
    for sequence in range(1, 5):
        save(keeping, sequence)
        kept = list(range(max(1, sequence - 1), sequence + 1))
        assert [entry.sequence for entry in store.entries()] == kept
    whole(store.open(3), 3)


def test_only_what_this_start_wrote_or_verified_counts_as_kept(store, save):
    for sequence in (1, 2, 3):
        save(store, sequence)
    (store.directory / "ckpt-0000000003" / "shared.safetensors").write_bytes(b"")
    restarted = CheckpointStore(store.directory, keep=2)
    assert restarted.newest()[0].sequence == 2
    save(restarted, 4)  # 2 was verified, 4 written: what is older than 2 goes, the broken 3 counts for nothing
    assert [entry.sequence for entry in store.entries()] == [2, 3, 4]
    save(restarted, 5)
    assert [entry.sequence for entry in store.entries()] == [4, 5]


def test_a_broken_one_never_has_a_whole_one_removed(store, save):
    for sequence in (1, 2, 3, 4):
        save(CheckpointStore(store.directory, keep=9), sequence)
    for sequence in (3, 4):
        (store.directory / f"ckpt-{sequence:010d}" / "manifest.json").unlink()
    restarted = CheckpointStore(store.directory, keep=2)
    save(restarted, 5)
    assert [entry.sequence for entry in store.entries()] == [1, 2, 3, 4, 5]


def test_what_was_removed_by_others_is_not_counted(store, save):
    keeping = CheckpointStore(store.directory, keep=2)
    for sequence in (1, 2, 3):
        save(CheckpointStore(store.directory, keep=9), sequence)
    keeping.open(3)
    keeping.open(2)
    for file in (store.directory / "ckpt-0000000003").iterdir():
        file.unlink()
    (store.directory / "ckpt-0000000003").rmdir()
    save(keeping, 4)
    assert [entry.sequence for entry in store.entries()] == [2, 4]


def test_clean_removes_what_other_attempts_left(store, save, whole):
    save(store, 1)
    for sequence, attempt in ((2, "first"), (2, "second"), (3, "second"), (2, "a-second")):
        save(store, sequence, world=2, attempt=attempt, ranks=[1])
    (store.directory / ".removed-ckpt-0000000000-abcd").mkdir()
    (store.directory / "notes.txt").write_text("mine")
    (store.directory / ".unfinished-7").mkdir()
    assert [entry.status for entry in store.entries()].count("unfinished") == 5
    store.clean("second")
    mine = [".unfinished-7", "ckpt-0000000001", "notes.txt"]
    assert names(store) == sorted([".unfinished-0000000002-second", ".unfinished-0000000003-second", *mine])
    store.clean()
    assert names(store) == mine
    whole(store.newest()[0], 1)


def test_a_save_removes_what_earlier_ones_left(store, save):
    save(store, 2, world=2, attempt="first", ranks=[1])
    save(store, 5, world=2, attempt="first", ranks=[1])
    save(store, 3, attempt="first")
    assert names(store) == [".unfinished-0000000005-first", "ckpt-0000000003"]


def test_prune(store, save, whole):
    for sequence in range(1, 7):
        save(CheckpointStore(store.directory, keep=9), sequence, world=2)
    torn = store.directory / "ckpt-0000000005" / "rank-1.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1] + b"\xff")  # of the right size
    (store.directory / "ckpt-0000000001" / "manifest.json").write_text("{}")
    save(store, 7, world=2, ranks=[1])
    (store.directory / "notes.txt").write_text("mine")
    going = [".unfinished-0000000007-a", *(f"ckpt-000000000{number}" for number in (1, 2, 3, 5))]
    before = names(store)
    assert [path.name for path in store.prune(2, dry_run=True)] == going
    assert names(store) == before
    assert [path.name for path in store.prune(2)] == going
    assert names(store) == ["ckpt-0000000004", "ckpt-0000000006", "notes.txt"]
    whole(store.open(4), 4, 2)
    whole(store.open(6), 6, 2)
    assert store.prune(2) == []


def test_prune_leaves_broken_ones_if_none_is_whole(store, save):
    save(store, 1).path.joinpath("manifest.json").write_text("{}")
    save(store, 2, world=2, ranks=[1])
    assert [path.name for path in store.prune(1)] == [".unfinished-0000000002-a"]
    assert names(store) == ["ckpt-0000000001"]


def test_one_that_is_removed_while_others_are_verified_is_not_broken(store, save, monkeypatch):
    """A training goes on meanwhile."""
    keeping, look = CheckpointStore(store.directory, keep=2), entry.inspect

    def inspect_slowly(sequence, path, *, every_byte):
        found = look(sequence, path, every_byte=every_byte)
        if sequence == 2:
            save(keeping, 3)
        return found

    save(keeping, 1)
    save(keeping, 2)
    monkeypatch.setattr(entry, "inspect", inspect_slowly)
    assert [(found.sequence, found.status) for found in store.entries(every_byte=True)] == [(2, "whole")]
