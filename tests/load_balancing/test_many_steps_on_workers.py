"""Shares stay those of the speeds after TensorFlow has learned how long operations take, about 100 steps."""

from pathlib import Path

import numpy as np
import pytest
from launched_runs import launch
from on_workers_many_steps import SECONDS_PER_ROW, STEPS

pytestmark = [pytest.mark.long, pytest.mark.multi_process]
_SCRIPT = Path(__file__).with_name("on_workers_many_steps.py")


@pytest.mark.parametrize("threads", [1, 2])
def test_500_steps_are_measured_and_rows_stay_where_they_belong(tmp_path, threads):
    run = launch(tmp_path, _SCRIPT, str(threads), options=["--workers", "2"]).assert_complete()
    seen = np.asarray(run.json("measured-0.json"))
    assert seen.shape == (STEPS, 2, 3)
    assert seen.tolist() == run.json("measured-1.json")
    shares, totals = seen[..., 0], seen[..., 1:]
    seconds, rows = np.moveaxis(np.diff(totals[1:], axis=0), -1, 0)
    # A sleep lasts at least its argument; sums of 500 steps in float64, of float32 seconds, are exact to 1e-6.
    assert (seconds > rows * SECONDS_PER_ROW - 1e-6).all(), "each step has been measured whole"
    # The fast worker should have 2/3. A busy machine slows both; it moves rows by measured times, not by wrong ones.
    assert (np.abs(shares[60:, 0] - 2 / 3) < 0.15).all()
