"""Fewer workers with more micro-batches compute what all workers compute, under `tfdist run`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import elastic_programs
import numpy as np
import on_workers_elastic
import pytest

from tfdist.strategies import MirroredStrategy

_HERE = Path(__file__).parent
_LIMIT_SECONDS = 280
# A dozen updates of sums that associate differently; Adam passes on the relative error of small gradients.
TOLERANCE = 2e-5

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("cpus")]


def run(folder, program, *options, workers=2):
    foreign = ("TF_CONFIG", "SLURM_", "TFDIST_", "JOB_COMPLETION_INDEX")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ |= {"PYTHONPATH": str(_HERE.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3"}
    script = [str(_HERE / "on_workers_elastic.py"), program, str(folder)]
    finished = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(workers), *options, *script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    return finished.stderr


def assert_all_close(ours, theirs, tolerance=TOLERANCE):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)


def of(arrays, program):
    return {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith(f"{program}/")}


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("same")
    run(folder, "same")
    ranks = [dict(np.load(folder / f"same-{rank}.npz")) for rank in range(2)]
    for name, array in ranks[0].items():
        if "/weights/" in name and array.ndim:  # each worker keeps its own `Own.first`
            np.testing.assert_array_equal(array, ranks[1][name], name)
    return ranks[0]


def one_worker(cpus, micro_batches):
    """What a single worker's strategy computes; it would have all logical devices of this process."""

    class OneWorker(MirroredStrategy):
        pass

    OneWorker.micro_batches = micro_batches
    return OneWorker(cpus[:1])


@pytest.mark.parametrize("program", sorted(elastic_programs.PROGRAMS))
def test_one_worker_computes_what_two_do(two_workers, cpus, program):
    one = one_worker(cpus, 2)
    outcome = elastic_programs.flat({program: elastic_programs.PROGRAMS[program](one)})
    assert_all_close(of(outcome, program), of(two_workers, program))


@pytest.mark.long
def test_two_workers_compute_what_four_replicas_do(two_workers, cpus):
    outcome = elastic_programs.flat({"of four": elastic_programs.everything(MirroredStrategy(cpus))})
    assert_all_close(of(outcome, "of four"), of(two_workers, "of four"))


def test_the_sum_of_the_micro_batches_is_encoded_and_sent_once(two_workers):
    whole, parts = of(two_workers, "powersgd"), of(two_workers, "powersgd in parts")
    assert len([name for name in whole if name.startswith("residuals")]) >= 1
    assert whole["exchanges/0"] > 0
    # PowerSGD's Gram matrix: see test_compression_on_workers.py.
    assert_all_close(parts, whole, tolerance=1e-3)
    assert [parts[f"exchanges/{index}"] for index in range(2)] == [whole[f"exchanges/{index}"] for index in range(2)]


@pytest.mark.parametrize(
    ("program", "workers", "micro_batches"),
    [
        ("disturbed", [2, 2, 1, 2], [1, 1, 2, 1]),
        # Two cannot make up for three by micro-batches: their own batches are larger.
        pytest.param("uneven", [3, 3, 2, 3], [1, 1, 1, 1], marks=pytest.mark.long),
    ],
)
def test_a_training_that_shrinks_and_grows_again_ends_as_if_nothing_had_happened(
    tmp_path, cpus, program, workers, micro_batches
):
    options = ["--min-workers", str(min(workers)), "--max-restarts", "3", "--restart-delay", "0"]
    said = run(tmp_path, program, *options, workers=max(workers))
    seen = [json.loads((tmp_path / f"attempt-{attempt}-0.json").read_text()) for attempt in range(4)]
    assert [attempt["workers"] for attempt in seen] == workers, said[-4000:]
    assert [attempt["micro_batches"] for attempt in seen] == micro_batches
    one, plain = one_worker(cpus, max(micro_batches)), program == "uneven"
    undisturbed = on_workers_elastic.train(one, tmp_path / "undisturbed", plain=plain)
    ours = of(dict(np.load(tmp_path / "disturbed-0.npz")), "training")
    assert_all_close(ours, of(elastic_programs.flat({"training": undisturbed}), "training"))
