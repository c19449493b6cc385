"""How long rank 0 waits for the other ranks' files."""

import types

import pytest
from replaced_clocks import slept_clock

from tfdist.checkpoint import CheckpointError, sharded_save


@pytest.mark.parametrize(("is_ending", "limit", "waited"), [(False, 600, 600), (True, 600, 60), (True, 10, 10)])
def test_a_program_that_exits_waits_less(tmp_path, monkeypatch, is_ending, limit, waited):
    clock = slept_clock(monkeypatch, sharded_save)
    main = types.SimpleNamespace(is_alive=lambda: not is_ending)
    monkeypatch.setattr(sharded_save, "threading", types.SimpleNamespace(main_thread=lambda: main))
    with pytest.raises(CheckpointError, match="Rank 1 has not written .* raise peer_timeout_seconds of FailureRec"):
        sharded_save.collect_receipts(tmp_path, [1], timeout_seconds=limit)
    assert clock.now == pytest.approx(waited, abs=1)
