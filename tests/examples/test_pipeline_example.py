"""The example of a pipeline, in a short run."""

import re

import pytest
from example_runs import run_example

pytestmark = [pytest.mark.multi_process, pytest.mark.long]


@pytest.mark.parametrize("ways", [1, 2])
def test_no_worker_holds_all_of_the_model(ways: int) -> None:
    arguments = ("--steps=30", "--blocks=3", "--limit_mb=6", f"--ways={ways}")
    output = run_example("pipeline.py", *arguments, options=("--chief", "--workers", "2"))
    last = re.search(
        rf"^\[chief\] pipeline: ([\d.]+) MB of variables in {2 // ways} stages, "
        r"at most ([\d.]+) MB on a worker \(limit 6\); "
        r"([\d.]+)% of the next words",
        output,
        re.MULTILINE,
    )
    assert last, output
    total, largest, accuracy = map(float, last.groups())
    assert total / 2 - 0.05 <= largest < 6 < total and accuracy > 5, output  # printed with one decimal
    assert re.search(r"worker:0/CPU:0 -> worker:1/CPU:0 +0.000 +[\d.]*[1-9]", output), output
