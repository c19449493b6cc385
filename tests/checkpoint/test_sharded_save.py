"""How long rank 0 waits for the other ranks' files, and what becomes of a rank for which it does not wait."""

import shutil
import types

import pytest
from replaced_clocks import slept_clock

from tfdist.checkpoint import CheckpointError, CheckpointStore, SavingRanks, Shard, sharded_save


@pytest.mark.parametrize(("is_ending", "limit", "waited"), [(False, 600, 600), (True, 600, 60), (True, 10, 10)])
def test_a_program_that_exits_waits_less(tmp_path, monkeypatch, is_ending, limit, waited):
    clock = slept_clock(monkeypatch, sharded_save)
    main = types.SimpleNamespace(is_alive=lambda: not is_ending)
    monkeypatch.setattr(sharded_save, "threading", types.SimpleNamespace(main_thread=lambda: main))
    with pytest.raises(CheckpointError, match="Rank 1 has not written .* raise peer_timeout_seconds of FailureRec"):
        sharded_save.collect_receipts(tmp_path, [1], timeout_seconds=limit)
    assert clock.now == pytest.approx(waited, abs=1)


def _save(store, rank, saving):
    shared = Shard({}) if rank == 0 else None
    return store.save(
        5, "a", rank=rank, num_ranks=2, rank_shard=Shard({}), shared_shard=shared, metadata={}, saving=saving
    )


def _end_before(name, store, monkeypatch, end):
    """Ends the save of rank 0 before rank 1 calls a function."""
    function = getattr(sharded_save, name)

    def call(path, *arguments):
        monkeypatch.setattr(sharded_save, name, function)
        end()
        return function(path, *arguments)

    monkeypatch.setattr(sharded_save, name, call)


@pytest.mark.parametrize("name", ["write_shard", "write_receipt"])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_rank_without_which_the_save_has_ended_trains_on(tmp_path, monkeypatch, caplog, name, is_committed):
    store, saving = CheckpointStore(tmp_path), SavingRanks((0, 1), lambda: [1], needs_all=not is_committed)
    ended = []
    _end_before(name, store, monkeypatch, lambda: ended.append(_save(store, 0, saving)))
    assert _save(store, 1, saving) is None
    assert [info.status for info in store.list_checkpoints()] == ["complete"] * is_committed
    assert (ended[0] is not None) == is_committed
    assert ("Received: no part of the ranks [1]" in caplog.text) == (not is_committed)


@pytest.mark.parametrize(("lost", "vanished"), [(None, "unfinished"), (lambda: [1], "directory")])
def test_files_that_vanish_otherwise_are_an_error(tmp_path, monkeypatch, lost, vanished):
    store = CheckpointStore(tmp_path / "checkpoints")

    def end():
        unfinished = next(store.directory.iterdir())
        shutil.rmtree(unfinished if vanished == "unfinished" else store.directory)

    _end_before("write_receipt", store, monkeypatch, end)
    with pytest.raises(CheckpointError, match="no other process removes files there"):
        _save(store, 1, SavingRanks((0, 1), lost))
