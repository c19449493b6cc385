"""Which checkpoint a training resumes from, and how other workers than the chief wait for a slow file system."""

import logging
import types

import pytest
from replaced_clocks import slept_clock

from tfdist.checkpoint import CheckpointError, CheckpointStore, Shard
from tfdist.recovery import resume
from tfdist.recovery.resume import choose_checkpoint, open_chosen_checkpoint


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "store")
    for sequence in (1, 2):
        store.save(sequence, "a", rank=0, num_ranks=1, rank_shard=Shard({}), shared_shard=Shard({}), metadata={})
    return store


@pytest.fixture
def clock(monkeypatch):
    return slept_clock(monkeypatch, resume)


def test_an_older_one_is_chosen_and_skipped_ones_are_logged(store, caplog):
    (store.directory / "ckpt-0000000002" / "manifest.json").write_text("torn")
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert choose_checkpoint(store).sequence == 1
    assert len(caplog.records) == 1 and "skips a checkpoint: ckpt-0000000002: m" in caplog.records[0].getMessage()


def test_nothing_was_saved_yet(tmp_path):
    assert choose_checkpoint(CheckpointStore(tmp_path)) is None


def test_none_is_complete(store):
    for sequence in (1, 2):
        (store.directory / f"ckpt-000000000{sequence}" / "shared.safetensors").unlink()
    leftover = store.directory / ".unfinished-0000000003-a"
    leftover.mkdir()
    before = sorted(store.directory.rglob("*"))
    with pytest.raises(CheckpointError) as error:
        choose_checkpoint(store)
    message = str(error.value)
    assert message.startswith(
        "None of the checkpoints is complete. Received: ckpt-0000000002: shared.safetensors is missing"
    )
    assert "ckpt-0000000001: shared" in message and str(store.directory) in message
    assert "Repair or mount" in message and "choose another one" in message
    assert sorted(store.directory.rglob("*")) == before


def test_another_worker_retries(store, clock):
    hidden = store.directory / "elsewhere"
    path = store.directory / "ckpt-0000000002"
    path.rename(hidden)

    def appear():
        if clock.now > 3 and hidden.exists():
            hidden.rename(path)

    clock.during = appear
    assert open_chosen_checkpoint(store, 2, rank=1).sequence == 2
    assert 3 < clock.now < 5


def test_it_lists_the_directory_because_network_file_systems_cache_missing_files(store, clock, monkeypatch):
    listed = []
    monkeypatch.setattr("tfdist.checkpoint.checkpoint_store.os", types.SimpleNamespace(listdir=listed.append))
    with pytest.raises(
        CheckpointError, match="Worker 3 cannot read the .* chosen: Checkpoint 7 is corrupt.* all workers"
    ):
        open_chosen_checkpoint(store, 7, rank=3)
    assert set(listed) == {store.directory} and 5 < clock.now < 15


def test_the_chief_does_not_wait(store, clock):
    with pytest.raises(CheckpointError, match="Checkpoint 7 is corrupt"):
        open_chosen_checkpoint(store, 7, rank=0)
    assert clock.now == 0


def test_another_format_does_not_change(store, clock, monkeypatch):
    monkeypatch.setattr("tfdist.checkpoint.manifest.FORMAT", 0)
    with pytest.raises(CheckpointError, match="another version"):
        open_chosen_checkpoint(store, 2, rank=1)
    assert clock.now == 0
