"""Programs without seeds on two workers: each sample once in an epoch, and the split of before after a restart."""

import json
from pathlib import Path

import pytest
from launched_runs import launch, launch_once
from unseeded_programs import DIFFERING, EPOCHS, PROGRAMS, STEPS

HERE = Path(__file__).parent
SCRIPT = HERE / "unseeded_programs.py"
WORKERS = ("--workers", "2")
pytestmark = pytest.mark.multi_process


def check_program(run, name, attempts):
    chosen = [run.json(f"split-{name}-{attempt}-{rank}.json") for attempt in attempts for rank in range(2)]
    assert all(each == chosen[0] for each in chosen), "the split or the labels differ"
    seen = {}
    for attempt in attempts:
        for rank in range(2):
            for line in run.path(f"steps-{name}-{attempt}-{rank}.jsonl").read_text().splitlines():
                step, ids = json.loads(line)
                seen[step, rank] = ids  # a later attempt repeats steps
    assert len(seen) == 2 * STEPS * EPOCHS
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS, (epoch + 1) * STEPS)
        samples = sorted(sample for step in steps for rank in range(2) for sample in seen[step, rank])
        expected = chosen[0]["train"]
        assert len(set(samples)) == len(samples)
        assert expected is None or samples == expected


def attempts_of(run, name):
    return sorted({int(path.stem.split("-")[-2]) for path in run.folder.glob(f"split-{name}-*-*.json")})


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_without_a_seed_that_is_killed_once(name, tmp_path_factory):
    run = launch_once(
        tmp_path_factory,
        "programs without seeds",
        SCRIPT,
        "|".join(PROGRAMS),
        "once",
        options=(*WORKERS, "--max-restarts", "30", "--restart-delay", "0", "--warm-spares"),
    )
    attempts = attempts_of(run, name)
    assert len(attempts) == 2
    check_program(run, name, attempts)


@pytest.mark.long
@pytest.mark.parametrize("name", DIFFERING)
def test_a_program_that_nothing_makes_equal_ends_with_an_error_on_every_worker(name, tmp_path):
    run = launch(tmp_path, SCRIPT, name, options=WORKERS)
    assert (tmp_path / "exit_code").read_text() == "1"
    for rank in range(2):
        lines = [line for line in run.output.splitlines() if line.startswith(f"[{rank}] ")]
        (error,) = [line for line in lines if "DifferentBatchesError: The workers draw different" in line]
        assert ("Received: y of worker 1 differs" if name == "labels" else "Received: x and y of worker 1") in error
