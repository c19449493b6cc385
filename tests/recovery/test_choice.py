"""Which checkpoint a training goes on from, and what other workers than the chief make of a slow file system."""

import logging
import types

import pytest
from slept_clock import slept_clock

from tfdist.checkpoint import CheckpointError, CheckpointStore, Shard
from tfdist.recovery import choice


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "store")
    for sequence in (1, 2):
        store.save(sequence, "a", rank=0, world=1, own=Shard({}), shared=Shard({}), facts={})
    return store


@pytest.fixture
def clock(monkeypatch):
    return slept_clock(monkeypatch, choice)


def test_an_older_one_is_chosen_and_what_was_passed_over_is_said(store, caplog):
    (store.directory / "ckpt-0000000002" / "manifest.json").write_text("torn")
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert choice.choose(store).sequence == 1
    assert len(caplog.records) == 1 and "passes over a checkpoint: ckpt-0000000002: m" in caplog.records[0].getMessage()


def test_nothing_was_saved_yet(tmp_path):
    assert choice.choose(CheckpointStore(tmp_path)) is None


def test_none_is_whole(store):
    for sequence in (1, 2):
        (store.directory / f"ckpt-000000000{sequence}" / "shared.safetensors").unlink()
    leftover = store.directory / ".unfinished-0000000003-a"
    leftover.mkdir()
    before = sorted(store.directory.rglob("*"))
    with pytest.raises(CheckpointError) as error:
        choice.choose(store)
    told = str(error.value)
    assert told.startswith("None of the checkpoints is whole. Received: ckpt-0000000002: shared.safetensors is missing")
    assert "ckpt-0000000001: shared" in told and str(store.directory) in told
    assert "Repair or mount" in told and "name another one" in told
    assert sorted(store.directory.rglob("*")) == before


def test_another_worker_looks_again(store, clock):
    hidden = store.directory / "elsewhere"
    path = store.directory / "ckpt-0000000002"
    path.rename(hidden)

    def appear():
        if clock.now > 3 and hidden.exists():
            hidden.rename(path)

    clock.during = appear
    assert choice.open_chosen(store, 2, rank=1).sequence == 2
    assert 3 < clock.now < 5


def test_it_lists_the_directory_as_network_file_systems_remember_what_was_not_there(store, clock, monkeypatch):
    listed = []
    monkeypatch.setattr(choice, "os", types.SimpleNamespace(listdir=listed.append))
    with pytest.raises(CheckpointError, match="Worker 3 cannot read the .* chosen: Checkpoint 7 is not .* all workers"):
        choice.open_chosen(store, 7, rank=3)
    assert set(listed) == {store.directory} and 5 < clock.now < 15


def test_the_chief_has_just_read_it_and_does_not_wait(store, clock):
    with pytest.raises(CheckpointError, match="Checkpoint 7 is not whole"):
        choice.open_chosen(store, 7, rank=0)
    assert clock.now == 0


def test_another_format_does_not_change(store, clock, monkeypatch):
    monkeypatch.setattr("tfdist.checkpoint.manifest.FORMAT", 0)
    with pytest.raises(CheckpointError, match="another version"):
        choice.open_chosen(store, 2, rank=1)
    assert clock.now == 0
