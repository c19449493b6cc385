"""Fewer workers with more micro-batches compute what all workers compute, under `tfdist run`."""

from pathlib import Path

import elastic_programs
import numpy as np
import pytest
from elastic_training import train
from launched_runs import launch

from tfdist.strategies import MirroredStrategy

_SCRIPT = Path(__file__).with_name("on_workers_elastic.py")

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("cpus")]


def outcome_of(run, program):
    """What the first of two workers has computed; the other has the same weights."""
    first, second = (run.arrays(f"{program}-{rank}.npz") for rank in range(2))
    for name, array in first.items():
        if "/weights/" in name and array.ndim:  # each worker keeps its own `Own.first`
            np.testing.assert_array_equal(array, second[name], name)
    return first


def one_worker(cpus, micro_batches):
    """What a single worker's strategy computes; it would have all logical devices of this process."""

    class OneWorker(MirroredStrategy):
        pass

    OneWorker.micro_batches = micro_batches
    return OneWorker(cpus[:1])


def in_this_process(program, strategy):
    return elastic_programs.flat({"": program(strategy)})


def test_the_run_ends_without_an_error(elastic_workers):
    elastic_workers.assert_complete()


@pytest.mark.parametrize("program", sorted(elastic_programs.PROGRAMS))
def test_one_worker_computes_what_two_do(elastic_workers, cpus, program):
    one = in_this_process(elastic_programs.PROGRAMS[program], one_worker(cpus, 2))
    elastic_programs.assert_close(one, outcome_of(elastic_workers, program))


@pytest.mark.long
def test_two_workers_compute_what_four_replicas_do(tmp_path, cpus):
    run = launch(tmp_path, _SCRIPT, "of_four", options=["--workers", "2"]).assert_complete()
    of_four = in_this_process(elastic_programs.everything, MirroredStrategy(cpus))
    elastic_programs.assert_close(of_four, outcome_of(run, "of four"))


def test_the_sum_of_the_micro_batches_is_encoded_and_sent_once(elastic_workers):
    whole, parts = outcome_of(elastic_workers, "powersgd"), outcome_of(elastic_workers, "powersgd in parts")
    assert len([name for name in whole if name.startswith("/residuals")]) >= 1
    assert whole["/exchanges/0"] > 0
    # PowerSGD's Gram matrix: see test_compression_on_workers.py.
    elastic_programs.assert_close(parts, whole, tolerance=1e-3)
    assert [parts[f"/exchanges/{index}"] for index in range(2)] == [whole[f"/exchanges/{index}"] for index in range(2)]


def assert_ended_as_undisturbed(run, folder, strategy, workers, micro_batches, *, plain=False):
    """Compares the training that was restarted thrice with one in this process."""
    seen = [run.json(f"attempt-{attempt}.json") for attempt in range(4)]
    assert [attempt["workers"] for attempt in seen] == workers, run.output[-4000:]
    assert [attempt.get("micro_batches") for attempt in seen] == micro_batches
    undisturbed = train(strategy, folder / "undisturbed", plain=plain)
    elastic_programs.assert_close(run.arrays("training-0.npz"), elastic_programs.flat({"": undisturbed}))


def test_a_training_that_shrinks_and_grows_again_ends_as_if_nothing_had_happened(elastic_workers, tmp_path, cpus):
    one = one_worker(cpus, 2)
    assert_ended_as_undisturbed(elastic_workers, tmp_path, one, [2, 2, 1, 2], [1, None, 2, 1])


@pytest.mark.long
def test_uneven_numbers_of_workers_end_as_if_nothing_had_happened(tmp_path, cpus):
    """Two workers cannot make up for three by micro-batches: their own batches are larger."""
    options = ["--workers", "3", "--min-workers", "2", "--max-restarts", "3", "--restart-delay", "0"]
    run = launch(tmp_path, _SCRIPT, "uneven", options=options).assert_complete()
    one = one_worker(cpus, 1)
    assert_ended_as_undisturbed(run, tmp_path, one, [3, 3, 2, 3], [1, None, 1, 1], plain=True)
