"""Which checkpoint counts, of that in memory and those on the disk."""

import os
from types import SimpleNamespace

import pytest

from tfdist.checkpoint import CheckpointError
from tfdist.cluster import MEMORY_VARIABLE
from tfdist.host_storage.host_store import HostStore
from tfdist.recovery import storage_tiers
from tfdist.recovery.storage_tiers import StorageTiers
from tfdist.recovery.worker_coordination import WorkerCoordination


def tiers_of(newest_on_disk):
    """Memory has checkpoint 3; the disk lists a 5, complete by its sizes."""
    disk = SimpleNamespace(
        list_checkpoints=lambda: [SimpleNamespace(sequence=5, status="complete")],
        newest=newest_on_disk,
        location="disk",
    )
    tiers = StorageTiers(disk, None)
    tiers.memory = SimpleNamespace(newest=lambda: (SimpleNamespace(sequence=3), []))
    return tiers


def test_memory_replaces_damaged_checkpoints():
    assert tiers_of(lambda: (None, ["ckpt-0000000005: damaged"])).choose() == (3, True)


def test_memory_does_not_replace_newer_checkpoints_that_cannot_be_read_now():
    def fail():
        raise CheckpointError("The file server does not respond")

    with pytest.raises(CheckpointError, match="does not respond"):
        tiers_of(fail).choose()


def test_meetings_end_after_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "run"))
    called = []
    monkeypatch.setattr(storage_tiers, "meet", lambda store, purpose, *_: lambda: called.append(purpose))
    monkeypatch.setattr(storage_tiers, "check_strategy", lambda *_: None)
    tiers = StorageTiers(HostStore(tmp_path / "disk"), 1)
    end = tiers.begin(WorkerCoordination(0, 1), None, os.environ, lambda: called.append("drain"))
    end()
    assert called == ["drain", "memory", "disk"]
