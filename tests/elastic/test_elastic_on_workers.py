"""Trainings in which workers are lost and join again compute what one process does, under `tfdist run --elastic`."""

import csv
import re
import signal
import subprocess
import sys
from pathlib import Path

import elastic_fits
import numpy as np
import pytest
from child_environment import child_environment
from launched_runs import launch, launch_once
from on_workers_elastic_fits import FAULTS, TRACED_EARLY
from thread_workers import wait_until

from tfdist.checkpoint import CheckpointStore
from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.strategies import MirroredStrategy

_SCRIPT = Path(__file__).with_name("on_workers_elastic_fits.py")
# 240 updates of sums that associate differently; Adam passes on the relative error of small gradients.
_TOLERANCE = {"epoch_of_loop": 5e-6, "recovered": 1e-5, "chief_is_lost": 1e-5, "two_are_lost": 5e-5, "one_leaves": 5e-6}

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("cpus")]


@pytest.fixture(scope="module")
def elastic_run(tmp_path_factory):
    options = ["--workers", "3", "--elastic", "1", "--max-restarts", "1"]
    return launch_once(tmp_path_factory, "elastic fits", _SCRIPT, options=options)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """What one process computes, by the name of the training, and where it writes."""
    folder = tmp_path_factory.mktemp("one process")
    results = {}
    for name, fit in elastic_fits.FITS.items():
        (folder / name).mkdir()
        results[name] = fit(MirroredStrategy(["CPU:0"]), folder / name, lambda model: [])
    return folder, results


def test_the_run_ends_without_an_error_and_counts_losses(elastic_run):
    output = elastic_run.assert_complete().output
    # The last one that is lost may join before the others have ended.
    assert re.search("7 workers lost, [56] joined", output), output[-3000:]
    assert "worker 1 left, as it was asked to" in output, output[-3000:]
    assert output.count("has joined the others") in (5, 6), output[-3000:]


def test_a_worker_with_a_flipped_bit_is_named_and_repaired(elastic_run):
    output = elastic_run.output
    found = re.findall(
        r"other weights than the majority\. Received: worker 2: (\S+/kernel); of 3 replicas after step", output
    )
    assert len(found) == 3, output[-3000:]  # a warning of two workers, and the error of the third
    assert "DifferentWeightsError: Replicas have other weights" in output


def test_spikes_are_taken_back_on_all_workers(elastic_run, one_process):
    expected = one_process[1]["one_leaves"]["spikes"]
    assert [epoch for epoch, _ in expected] == [0, 1, 2]
    assert "SpikeGuard: a training step is taken back: loss" in elastic_run.output


@pytest.mark.parametrize("name", elastic_fits.FITS)
def test_weights_logs_and_predictions_are_those_of_one_process(elastic_run, one_process, name):
    expected = one_process[1][name]
    for rank in range(3):
        got = elastic_run.arrays(f"{name}-{rank}.npz")
        assert got.keys() - {"shares"} == expected.keys()
        for key, values in expected.items():
            tolerance = _TOLERANCE[name]
            np.testing.assert_allclose(got[key], values, rtol=tolerance, atol=tolerance, err_msg=f"{key}, {rank}")


def test_when_all_have_ended_they_continue_from_what_those_have_saved_that_were_left(elastic_run):
    for rank in range(3):
        assert elastic_run.json(f"recovered-{rank}-0.json") == []
        found = elastic_run.json(f"recovered-{rank}-1.json")
        (step, ranks), before = found[-1], [step for step, _ in found]
        assert step in (28, 32) and ranks == [1, 2], found
        assert 20 not in before and 24 in before, "a save whose chief was lost is given up, and the next one is not"


def test_a_worker_that_has_joined_saves_with_the_others(elastic_run):
    store = CheckpointStore(elastic_run.path("one_leaves") / "checkpoints")
    last, _ = store.newest()
    assert (last.metadata["step"], last.saved_ranks) == (240, (0, 1, 2))
    assert not [*store.directory.glob(".unfinished*")]


@pytest.mark.parametrize("name", elastic_fits.FITS)
def test_workers_end_with_the_same_bits(elastic_run, name):
    first = elastic_run.arrays(f"{name}-0.npz")
    for rank in (1, 2):
        for key, values in elastic_run.arrays(f"{name}-{rank}.npz").items():
            np.testing.assert_array_equal(values, first[key], f"{key}, {rank}")


@pytest.mark.long
@pytest.mark.parametrize("name", elastic_fits.MORE_FITS)
def test_more_trainings_on_two_devices_a_worker(tmp_path, name):
    run = launch(tmp_path, _SCRIPT, name, options=["--workers", "3", "--elastic", "1"]).assert_complete()
    faults = len(FAULTS[name])
    assert f"{faults} worker{'s' * (faults > 1)} lost, {faults} joined" in run.output, run.output[-3000:]
    wrong = re.findall(r"other gradients than the majority\. Received: worker 2, device 0: loss", run.output)
    assert len(wrong) == (3 if name == "wrong_gradients" else 0), run.output[-3000:]
    first, *others = (run.arrays(f"{name}-{rank}.npz") for rank in range(3))
    for key, values in first.items():
        for other in others:
            np.testing.assert_array_equal(other[key], values, key)
    if name.startswith("compressed"):
        return
    tolerance = 5e-3 if name == "rounded" else 1e-5
    for key, values in elastic_fits.MORE_FITS[name](MirroredStrategy(["CPU:0"]), tmp_path, lambda model: []).items():
        np.testing.assert_allclose(first[key], values, rtol=tolerance, atol=tolerance, err_msg=key)


@pytest.mark.long
def test_all_that_are_asked_to_leave_save_first_and_continue_when_they_are_started_again(tmp_path):
    options = ["--workers", "3", "--elastic", "1"]
    command = [sys.executable, "-m", "tfdist.launch", "run", *options, str(_SCRIPT), str(tmp_path), "preempted"]
    with subprocess.Popen(command, env=child_environment(TMPDIR=str(tmp_path))) as process:
        wait_until(lambda: all((tmp_path / f"trains-{rank}").exists() for rank in range(3)), "steps", 300.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == PREEMPTED_EXIT_CODE
    (tmp_path / "leaves").touch()
    store = CheckpointStore(tmp_path / "preempted" / "checkpoints")
    (saved,) = store.list_checkpoints(verify_checksums=True)
    assert saved.status == "complete" and 0 < saved.metadata["step"] < 240
    run = launch(tmp_path, _SCRIPT, "preempted", options=options).assert_complete()
    (tmp_path / "alone").mkdir()
    expected = elastic_fits.preempted(MirroredStrategy(["CPU:0"]), tmp_path / "alone", lambda model: [])
    for rank in range(3):
        got = run.arrays(f"preempted-{rank}.npz")
        for key, values in expected.items():
            np.testing.assert_allclose(got[key], values, rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", elastic_fits.FITS)
def test_workers_that_join_trace_their_step_early_where_no_callback_may_change_it(elastic_run, name):
    lost = {rank for rank, *_ in FAULTS.get(name, ())}
    for rank in range(3):
        traced = elastic_run.json(f"{name}-{rank}.traced")
        assert len(traced) == (name in TRACED_EARLY and rank in lost), (rank, traced)


def test_the_file_of_a_callback_is_continued_when_its_worker_is_lost(elastic_run, one_process):
    def rows(path):
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    expected = rows(one_process[0] / "chief_is_lost" / "log.csv")
    got = rows(elastic_run.path("chief_is_lost") / "log.csv")
    assert [row["epoch"] for row in got] == ["0", "1", "2"]
    for row, expected_row in zip(got, expected, strict=True):
        assert row.keys() == expected_row.keys()
        assert all(abs(float(row[key]) - float(expected_row[key])) < 1e-5 for key in row), (row, expected_row)
