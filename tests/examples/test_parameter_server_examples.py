"""The examples of parameter servers, each in a short run on a cluster."""

import re
from pathlib import Path

import pytest
from example_runs import run_example
from optional_packages import require

require("sklearn", "tensorflow_datasets")

pytestmark = pytest.mark.multi_process


def run(servers: int, *script: str) -> str:
    return run_example(*script, options=("--workers", "2", "--parameter-servers", str(servers)))


# By default the cases of tests/parameter_server train in rounds, and count the parts of workers.
@pytest.mark.long
def test_digits_are_learnt_in_rounds(tmp_path: Path) -> None:
    output = run(1, "parameter_server.py", "--mode=synchronous", "--epochs=3", f"--data_dir={tmp_path}")
    last = re.search(r"^\[chief\] digits, synchronous: ([\d.]+) % held-out accuracy$", output, re.MULTILINE)
    assert last and float(last[1]) > 80, output
    # Both workers had a part of each of 3 x 23 batches, and no image is lost.
    rows = re.findall(r"^\[chief\] (\d|total) +([\d,]+) +([\d,]+) +([\d,]+) ", output, re.MULTILINE)
    assert [row[:3] for row in rows[:2]] == [("0", "69", "0"), ("1", "69", "0")], output
    assert rows[2][3] == f"{3 * 1442:,}", output


# By default the cases of tests/parameter_server train by federated averaging.
@pytest.mark.long
def test_clients_with_two_digits_each_learn_all_digits(tmp_path: Path) -> None:
    output = run(1, "federated.py", f"--data_dir={tmp_path}")
    last = re.search(
        r"^\[chief\] federated digits: 10 clients, 40 rounds, ([\d.]+) % held-out accuracy$", output, re.MULTILINE
    )
    assert last and float(last[1]) >= 93, output


@pytest.mark.long
def test_a_step_moves_a_small_part_of_the_tables() -> None:
    output = run(2, "embeddings.py", "--steps=150", "--epochs=2", "--batch_size=64")
    last = re.search(
        r"^\[chief\] embeddings: two tables of [\d,]+ words, ([\d.]+) MB, ([\d.]+) \+ ([\d.]+) on 2 servers\. "
        r"A step pulled [\d.]+ MB, ([\d.]+) % of the tables, and pushed [\d.]+ MB, ([\d.]+) %$",
        output,
        re.MULTILINE,
    )
    assert last, output
    tables, first, second, pulled, pushed = map(float, last.groups())
    assert tables > 10 and abs(first - second) < 0.1 and abs(first + second - tables) < 0.2
    assert 0 < pulled < 2 and 0 < pushed < 2
    losses = [float(loss) for loss in re.findall(r"75/75 .* - loss: ([\d.]+) ", output)]
    assert len(losses) == 2 and losses[1] < losses[0] < 2.773  # ln 16, of a guess
