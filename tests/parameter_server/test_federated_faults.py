"""Federated averaging while a client's worker is stopped or killed, and after the chief was killed."""

import pytest
from cluster_runs import launch_chief

pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("cpus")]


def results(tmp_path_factory, name, workers=2):
    options = ["--heartbeat-timeout", "60", "--max-restarts", "1"]
    folder = tmp_path_factory.mktemp(name)
    run = launch_chief(folder, "federated_faults.py", name, workers=workers, options=options)
    return run.assert_complete().json("results.json")[name]


@pytest.mark.long
def test_rounds_end_at_the_deadline_without_a_stopped_worker(tmp_path_factory):
    seen = results(tmp_path_factory, "stopped")
    assert seen["rounds"] == 12
    assert seen["left_out"] <= 1  # one call; its worker gets no other one until it has ended


@pytest.mark.long
def test_a_restarted_chief_ends_bit_identical(tmp_path_factory):
    seen = results(tmp_path_factory, "resumed")
    assert seen["equal"] and seen["compared"] > 20
    assert seen["rounds"] == 12
    for resumed, uninterrupted in (seen["loss"], seen["validation"]):
        assert resumed == uninterrupted
    assert seen["attempts_before"] == 1


@pytest.mark.long
def test_a_worker_that_is_killed_in_each_round_loses_no_round(tmp_path_factory):
    seen = results(tmp_path_factory, "killed", workers=3)
    assert seen["hit"] == 6
    assert seen["rounds"] == 8
    assert seen["finite"]
