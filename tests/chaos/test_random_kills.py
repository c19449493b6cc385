"""Workers that are killed at random moments end as if nothing had happened, and see each sample once.

An update is accumulated over two steps, and PowerSGD compresses the gradients: a kill after an odd number of steps hits
a half done accumulation, and every kill hits residuals. A table shows what the kills have hit. The environment variable
CHAOS_SEED chooses other moments; each run prints its value.
"""

import os
import random

import pytest
from random_kills import BETWEEN_EPOCHS, HALF_DONE, RandomKills, count_moments
from training import EPOCHS
from worker_journal import SAVING
from worker_runs import assert_as_undisturbed

KILLS = 20
# What these kills must hit, among other moments.
EXPECTED = {"restore", "validation", BETWEEN_EPOCHS, SAVING, HALF_DONE}
pytestmark = [pytest.mark.multi_process, pytest.mark.long, pytest.mark.timeout(2700)]


@pytest.mark.parametrize(("kind", "workers"), [("workers", 2), ("workers", 3), ("replicas", 1)])
def test_kills_at_random_moments(tmp_path, undisturbed_workers, kind, workers):
    seed, epochs = int(os.environ.get("CHAOS_SEED", "3")), 10 * EPOCHS
    print(f"CHAOS_SEED={seed}")
    generator, moments = random.Random(seed), []
    undisturbed = undisturbed_workers(workers, kind=kind, epochs=epochs)
    for number in range(KILLS):  # a training may finish before all kills
        folder = tmp_path / str(number)
        killing = RandomKills(folder, kind, workers, epochs, generator, steps_seconds=0.05 * epochs + 0.5)
        said = killing.run(KILLS - len(moments))
        moments += killing.moments
        print(f"training {number}:", *(f"rank {rank}: {moment}" for rank, moment in killing.moments), sep="\n  ")
        assert_as_undisturbed(undisturbed, folder, workers, said)
        if len(moments) == KILLS:
            break
    hit = count_moments(moments)
    print(f"{kind}, {workers}:", *(f"{count:3d} {what}" for what, count in hit.most_common()), sep="\n  ")
    assert len(moments) == KILLS and set(hit) >= EXPECTED, f"{EXPECTED - set(hit)} were not hit: choose a CHAOS_SEED"
