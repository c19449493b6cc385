"""Workers that are killed, frozen and broken at every kind of moment end with the weights of the undisturbed run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training import differences

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 280
pytestmark = pytest.mark.multi_process

# Every second attempt at least comes further than those before it, or `tfdist run` gives up.
PLANS = {
    2: [
        {"rank": 1, "at": "on_train_batch_end", "count": 5, "do": "SIGKILL"},
        {"rank": 0, "at": "restore", "count": 1, "do": "SIGKILL"},
        {"rank": 1, "at": "on_test_batch_end", "count": 2, "do": "SIGSTOP"},
        {"rank": 0, "at": "fsync", "count": 7, "do": "SIGKILL"},
        {"rank": 0, "at": "on_epoch_end", "count": 1, "do": "raise"},
    ],
    3: [{"rank": 2, "at": "on_train_batch_end", "count": 9, "do": "SIGKILL"}],
}


def run(folder, workers, plan, *, code=0):
    """Runs `on_workers.py` and returns what was shown."""
    folder.mkdir(exist_ok=True)
    foreign = ("TF_CONFIG", "SLURM_", "TFDIST_", "JOB_COMPLETION_INDEX")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ |= {"PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    restarts = 0 if code else len(plan)
    options = ["--workers", str(workers), "--max-restarts", str(restarts), "--heartbeat-timeout", "3"]
    script = [str(Path(__file__).with_name("on_workers.py")), str(folder), json.dumps(plan)]
    finished = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", "run", *options, *script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    assert finished.returncode == code, finished.stderr[-6000:]
    assert finished.stdout.count("fault: ") == len(plan), "every fault has struck"
    return finished.stderr


def results(folder, workers):
    """By rank, what `train` returned."""
    return [dict(np.load(folder / f"result-{rank}.npz")) for rank in range(workers)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The results of trainings that nothing disturbs, by the number of workers."""
    known = {}

    def of(workers):
        if workers not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            run(folder, workers, [])
            known[workers] = results(folder, workers)
        return known[workers]

    return of


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_disturbed_workers_end_as_if_nothing_had_happened(tmp_path, undisturbed, workers):
    said = run(tmp_path, workers, PLANS[workers])
    for expected, result in zip(undisturbed(workers), results(tmp_path, workers), strict=True):
        assert differences(expected, result) == [], said[-3000:]


def test_a_signal_to_one_worker_saves_and_ends_all(tmp_path, undisturbed):
    told = {"rank": 1, "at": "on_train_batch_end", "count": 4, "do": "SIGTERM"}
    run(tmp_path, 2, [told], code=75)
    assert len(list((tmp_path / "checkpoints").glob("ckpt-*"))) == 2, "after step 3, and after the signal"
    run(tmp_path, 2, [])
    for expected, result in zip(undisturbed(2), results(tmp_path, 2), strict=True):
        assert differences(expected, result) == []


def test_fewer_workers_take_over_what_more_have_saved(tmp_path, undisturbed):
    told = {"rank": 0, "at": "on_train_batch_end", "count": 9, "do": "SIGTERM"}
    run(tmp_path, 2, [told], code=75)
    run(tmp_path, 1, [])
    (result,) = results(tmp_path, 1)
    expected = undisturbed(2)[0]
    assert result["epochs"].tolist() == expected["epochs"].tolist() and len(result["rows"]) == len(expected["rows"])
    # The first epoch was theirs; after that one replica draws other masks of dropout.
    assert result["history loss"][0] == expected["history loss"][0]
    assert abs(result["history val_loss"][-1] - expected["history val_loss"][-1]) < 0.5
