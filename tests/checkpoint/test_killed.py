"""A save that is killed at any moment leaves the old or the new checkpoint as the newest, complete and on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.checkpoint import CheckpointStore, checkpoint_store

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize(
    ("scenario", "old", "fewest_operations"),
    [
        ("First", None, 12),
        ("Scenario", 1, 12),
        ("Retired", 1, 15),
        ("Replaced", 1, 18),
        ("ChiefOfTwo", 1, 12),
        ("PeerOfTwo", 1, 6),
    ],
)
def test_any_prefix_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path, scenario, old, fewest_operations):
    program = [sys.executable, str(HERE / "kill_everywhere.py"), scenario, str(tmp_path)]
    done = subprocess.run(program, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) > fewest_operations
    # First the old one, from some operation on the new one, and each at least once.
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome or 0)
    assert (outcomes[0], outcomes[-1]) == (old, 2)
    assert set(outcomes) == {old, 2}


def test_everything_is_on_the_disk_before_it_counts(tmp_path, save, monkeypatch):
    """What a power failure leaves: at the renaming every file and entry has been flushed since it last changed."""
    store = CheckpointStore(tmp_path / "store")
    flushed: dict[int, tuple[int, int]] = {}  # by inode: time and size at the last flush
    unflushed_entries: set[Path] = set()
    looked_at: list[str] = []
    fsync, rename, write_direct = os.fsync, os.rename, checkpoint_store.write_direct

    def note_flush(descriptor):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        found = os.fstat(descriptor)
        flushed[found.st_ino] = (found.st_mtime_ns, found.st_size)
        unflushed_entries.discard(path)

    def note_file(path, parts):
        unflushed_entries.add(path.parent)
        return write_direct(path, parts)

    def note_rename(source, target):
        if target.name.startswith("ckpt-"):
            for file in source.iterdir():
                found = file.stat()
                assert flushed.get(found.st_ino) == (found.st_mtime_ns, found.st_size), f"{file.name} is not flushed"
                looked_at.append(file.name)
            assert source not in unflushed_entries, "its entries are not flushed"
        rename(source, target)
        unflushed_entries.add(target.parent)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(checkpoint_store, "write_direct", note_file)
    save(store, 1, num_ranks=2)
    names = ["manifest.json", "rank-0.safetensors", "rank-1.safetensors", "shared.safetensors"]
    assert sorted(looked_at) == names
    assert not unflushed_entries
    assert {tmp_path.stat().st_ino, store.directory.stat().st_ino} <= flushed.keys()
