"""Workers of which random ones are killed at random moments end as if nothing had happened, and see each sample once.

CHAOS_SEED in the environment chooses other moments; each run prints its own.
"""

import os
import random

import pytest
from random_kills import RandomKills
from training import EPOCHS
from worker_runs import assert_as_undisturbed

pytestmark = pytest.mark.multi_process
LONG = [pytest.mark.long, pytest.mark.timeout(2400)]


@pytest.mark.parametrize(
    ("kind", "workers", "kills", "epochs"),
    [
        pytest.param("workers", 2, 3, EPOCHS, marks=LONG),
        pytest.param("workers", 2, 20, 10 * EPOCHS, marks=LONG),
        pytest.param("workers", 3, 6, 5 * EPOCHS, marks=LONG),
        pytest.param("replicas", 1, 6, 5 * EPOCHS, marks=LONG),
    ],
)
def test_kills_at_random_moments(tmp_path, undisturbed_workers, kind, workers, kills, epochs):
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    print(f"CHAOS_SEED={seed}")
    generator, left = random.Random(seed), kills
    undisturbed = undisturbed_workers(workers, kind=kind, epochs=epochs)
    for number in range(kills):  # a training may be through before all have struck
        folder = tmp_path / str(number)
        killing = RandomKills(folder, kind, workers, epochs, generator, steps_seconds=0.05 * epochs + 0.5)
        said = killing.run(left)
        left -= len(killing.moments)
        print(f"training {number}:", *killing.moments, sep="\n  ")
        assert_as_undisturbed(undisturbed, folder, workers, said)
        if not left:
            break
    assert left == 0
