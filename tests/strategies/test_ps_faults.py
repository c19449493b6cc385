"""Parameter servers: a worker that is killed or stopped in the middle of an epoch, under `tfdist run`."""

import numpy as np
import ps_backup_workers
import pytest
from ps_clusters import run_chief

pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("cpus")]

KILLED = "killed by SIGKILL (if nobody did so by hand"
UPDATES = 30  # three epochs of ten batches


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    results = run_chief("on_ps_faults.py", folder, workers=3, servers=2, options=["--heartbeat-timeout", "5"])
    return results | {"output": (folder / "output.txt").read_text()}


def test_a_late_part_changes_nothing_and_keeps_its_slot(results):
    seen, reference = results["left out"], ps_backup_workers.expected()
    assert seen["events"] == ["in time", "in time", "in time", "late", "in time"]
    np.testing.assert_allclose(seen["kernel"], reference["kernel"], atol=1e-6)
    assert seen["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert seen["updates"] == 2 and seen["free"]
    steps, samples, left_out = (sum(of_workers) for of_workers in zip(*seen["counts"], strict=True))
    assert (steps, samples, left_out) == (5, 15, 1)
    assert [1, 3, 1] in seen["counts"]  # the late worker has had no other part


def test_no_second_strategy_is_made_while_a_worker_is_lost(results):
    messages = {message for message in results["second strategies"] if message != "made"}
    assert messages
    for message in messages:
        assert message.startswith("While a worker is lost, no second parameter server strategy can be made")
        assert "Expected: all 3 workers up." in message


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
