"""A training in stages on workers that are killed or frozen ends as the undisturbed one in one process, bit by bit."""

import os
import random
import signal
from pathlib import Path

import on_stages
import pytest
from stage_runs import Run, assert_as_undisturbed

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(1500)]

SCRIPT = Path(on_stages.__file__)


@pytest.mark.parametrize(
    ("task", "number", "cause"),
    [
        pytest.param("worker 1", signal.SIGKILL, "worker 1 failed first: killed by SIGKILL", marks=pytest.mark.long),
        pytest.param("worker 0", signal.SIGSTOP, "worker 0 failed first: frozen: ", marks=pytest.mark.long),
        pytest.param("chief", signal.SIGKILL, "chief failed first: killed by SIGKILL", marks=pytest.mark.long),
    ],
)
def test_lost_process(cpus, tmp_path, task, number, cause):
    undisturbed = on_stages.trained(tmp_path, 12, 0.0, cpus[:2])
    with Run(SCRIPT, 2, tmp_path / "run", 12, 0.5, "--heartbeat-timeout", "10") as run:  # half a minute in all
        run.wait(lambda: run.steps() > on_stages.STEPS + 1)  # in the middle of an epoch, after a checkpoint
        run.strike(task, number, run.processes())
        (run.folder / "struck").touch()
        said = run.end()
    assert_as_undisturbed(tmp_path / "run", undisturbed)
    assert cause in said and "restart 1 of 1000 at once with 2 workers" in said
    assert "training resumes after step " in said


@pytest.mark.long
def test_kills_at_random_moments(cpus, tmp_path):
    kills, epochs, seed = 20, 60, int(os.environ.get("CHAOS_SEED", "3"))
    print(f"CHAOS_SEED={seed}")
    generator = random.Random(seed)
    undisturbed = on_stages.trained(tmp_path, epochs, 0.0, cpus[:2])
    with Run(SCRIPT, 2, tmp_path / "run", epochs, 0.05) as run:
        struck = run.strike_randomly(kills, generator, on_stages.SAVED_EVERY)
        said = run.end()
    print(*struck, sep="\n")
    assert_as_undisturbed(tmp_path / "run", undisturbed)
    assert len(struck) == kills and said.count("failed first: killed by SIGKILL") == kills
