"""A worker is late, killed or stopped in the middle of an epoch, under `tfdist run`."""

import re

import backup_worker_round
import numpy as np
import pytest
from cluster_runs import launch_chief

pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("cpus")]

KILLED = "killed by SIGKILL (possibly the OOM killer)"
UPDATES = 30  # three epochs of ten batches


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    run = launch_chief(folder, "on_cluster_faults.py", "steps", workers=3, options=["--heartbeat-timeout", "5"])
    return run.assert_complete().json("results.json") | {"output": run.output}


def test_a_late_part_changes_nothing_and_keeps_its_buffer(results):
    seen, reference = results["left out"], backup_worker_round.expected()
    assert seen["events"] == ["in time", "in time", "in time", "late", "in time"]
    np.testing.assert_allclose(seen["kernel"], reference["kernel"], atol=1e-6)
    assert seen["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert seen["updates"] == 2 and seen["free"]
    steps, samples, left_out = (sum(of_workers) for of_workers in zip(*seen["counts"], strict=True))
    assert (steps, samples, left_out) == (5, 15, 1)
    assert [1, 3, 1] in seen["counts"]  # the late worker got no other part


def test_no_second_strategy_while_a_worker_is_lost(results):
    messages = {message for message in results["second strategies"] if message != "made"}
    assert messages
    for message in messages:
        assert message.startswith("While a worker is lost, a process cannot create a second parameter server strategy")
        assert "Expected: all 3 workers reachable." in message


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_rounds_end_as_without_a_fault(results, how):
    seen = results[f"synchronous, {how}"]
    assert seen["hit"]
    assert seen["updates"] == UPDATES
    assert seen["difference"] <= 1e-6


def test_asynchronous_training_continues(results):
    seen = results["asynchronous, killed"]
    assert seen["hit"]
    assert UPDATES <= seen["updates"] <= UPDATES + 4  # the lost worker's batches are pushed at least once
    last, first_of_one_process = seen["loss"]
    assert last < first_of_one_process


def test_the_launcher_reports_the_failures(results):
    said = [line for line in results["output"].splitlines() if line.startswith("tfdist: worker ") and "failed:" in line]
    assert [re.match(r"tfdist: (worker . failed): ([^;:]+)", line).groups() for line in said] == [
        ("worker 0 failed", KILLED),
        ("worker 1 failed", KILLED),
        ("worker 1 failed", "frozen"),
    ]


@pytest.mark.long
def test_workers_killed_between_the_phases_of_a_round_change_nothing(tmp_path):
    run = launch_chief(tmp_path, "on_cluster_faults.py", "phases", options=["--heartbeat-timeout", "5"])
    seen = run.assert_complete().json("results.json")
    assert len(seen["hit"]) == 2
    assert seen["counts"] == seen["right counts"]
    assert seen["difference"] <= 1e-6
