"""A worker that is killed or frozen between two exchanges: all restart, and end with the same weights."""

import signal
from pathlib import Path

import numpy as np
import pytest
from launched_runs import launch

pytestmark = [pytest.mark.multi_process, pytest.mark.long]
_SCRIPT = Path(__file__).with_name("killed_local_worker.py")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_the_restarted_training_is_that_without_a_fault(tmp_path, fault):
    options = ["--workers", "2", "--max-restarts", "1"]
    for name, number in (("faulty", int(fault)), ("complete", 0)):
        (tmp_path / name).mkdir()
        launch(tmp_path / name, _SCRIPT, str(number), options=options, limit_seconds=240).assert_complete()
    for rank in range(2):
        faulty, complete = (np.load(tmp_path / name / f"end-{rank}.npz") for name in ("faulty", "complete"))
        for key in complete.files:
            np.testing.assert_array_equal(faulty[key], complete[key])
