"""Memory, threads and descriptors of a training do not grow with its steps."""

from pathlib import Path

import numpy as np
import pytest
from launched_runs import launch
from long_training import WORKERS

# A record of TensorFlow that a step leaves behind has 600 bytes and more, twice of it if workers agree on it. What
# comes and goes (lists of metrics, blocks that threads keep) moves the bytes by some 10 kB: less than 20 a step here.
# So a growth that 100,000 steps would show is seen in a few thousands.
STEPS = 5000
BYTES_A_STEP = 500

pytestmark = [pytest.mark.long, pytest.mark.multi_process]


@pytest.mark.parametrize("case", WORKERS)
def test_a_process_does_not_grow_with_its_steps(case, tmp_path):
    script = Path(__file__).with_name("long_training.py")
    run = launch(tmp_path, script, case, str(STEPS), options=WORKERS[case][1]).assert_complete()
    rows = run.json(f"{case}.json")
    rows = rows[len(rows) // 4 :]  # caches are full, the first checkpoints are written
    growth = float(np.polyfit([row["step"] for row in rows], [row["bytes"] for row in rows], 1)[0])
    assert growth <= BYTES_A_STEP, rows
    for kind in ("threads", "descriptors"):
        counts = [row[kind] for row in rows]
        # A save in the background has a thread and a file as long as it lasts.
        assert max(counts[len(counts) // 2 :]) <= max(counts[: len(counts) // 2]) + 2, rows
