"""Data, pipeline and tensor parallelism on eight workers that are killed: it ends as undisturbed, bit by bit."""

import os
import random
from pathlib import Path

import numpy as np
import on_sharded_stages
import pytest
import tensorflow as tf
from child_environment import run_python
from stage_runs import LIMIT_SECONDS, Run, assert_as_undisturbed

pytestmark = [pytest.mark.multi_process, pytest.mark.long, pytest.mark.timeout(2700)]

SCRIPT = Path(on_sharded_stages.__file__)


def test_kills_at_random_moments(cpus: list[str], tmp_path: Path) -> None:
    kills, epochs, seed = 10, 30, int(os.environ.get("CHAOS_SEED", "3"))
    print(f"CHAOS_SEED={seed}")
    (one_process := tmp_path / "one process").mkdir()
    run_python(SCRIPT, one_process, str(epochs), "0", paths=(SCRIPT.parent,), limit_seconds=LIMIT_SECONDS)
    undisturbed = dict(np.load(one_process / "state.npz"))
    assert undisturbed["number of split weights"] == on_sharded_stages.SPLIT_WEIGHTS
    with Run(SCRIPT, on_sharded_stages.DEVICES, tmp_path / "run", epochs, 0.05) as run:
        struck = run.strike_randomly(kills, random.Random(seed), on_sharded_stages.SAVED_EVERY)
        said = run.end()
    print(*struck, sep="\n")
    assert_as_undisturbed(tmp_path / "run", undisturbed)
    assert len(struck) == kills and said.count("failed first: killed by SIGKILL") == kills

    # The parts that the workers have written are complete variables in one process, and parts of two stages there.
    newest = max((tmp_path / "run" / "checkpoints").glob("ckpt-*"))
    sizes = [path.stat().st_size for path in newest.glob("worker-*.data-*")]
    assert len(sizes) == on_sharded_stages.DEVICES
    for strategy in (tf.distribute.get_strategy(), on_sharded_stages.parallel(cpus[:4], columns=1)):
        restored = on_sharded_stages.trained(strategy, tmp_path / "run", epochs, 0.0)
        for name, expected in undisturbed.items():
            np.testing.assert_array_equal(restored[name], expected, err_msg=name)
