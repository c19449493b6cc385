"""Parameter servers: a worker that is killed or stopped in the middle of an epoch, under `tfdist run`."""

import pytest
from ps_clusters import run_chief

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

KILLED = "killed by SIGKILL (if nobody did so by hand"
UPDATES = 30  # three epochs of ten batches


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    results = run_chief("on_ps_faults.py", folder, servers=2, options=["--heartbeat-timeout", "5"])
    return results | {"output": (folder / "output.txt").read_text()}


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_rounds_end_as_if_nothing_had_happened(results, how):
    seen = results[f"synchronous, {how}"]
    assert seen["hit"]
    assert seen["updates"] == UPDATES
    assert seen["difference"] <= 1e-6


def test_asynchronous_training_goes_on(results):
    seen = results["asynchronous, killed"]
    assert seen["hit"]
    assert UPDATES <= seen["updates"] <= UPDATES + 4  # what the worker was at is pushed at least once
    last, first_of_one_process = seen["loss"]
    assert last < first_of_one_process


def test_the_launcher_says_what_happened(results):
    said = [line for line in results["output"].splitlines() if line.startswith("tfdist: worker ") and "failed:" in line]
    assert [line.removeprefix("tfdist: ").split(": ")[:2] for line in said] == [
        ["worker 0 failed", KILLED],
        ["worker 1 failed", KILLED],
        ["worker 1 failed", "frozen"],
    ]
