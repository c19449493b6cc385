"""Workers that are killed, frozen and broken at every kind of moment end with the weights of the undisturbed run."""

import subprocess

import pytest
from worker_runs import assert_as_undisturbed, command, results

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
    restarts = 0 if code else len(plan)
    options = ["--max-restarts", str(restarts), "--heartbeat-timeout", "3"]
    arguments, environ = command(folder, "workers", workers, *options, plan=plan)
    finished = subprocess.run(
        arguments, env=environ, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )
    assert finished.returncode == code, finished.stderr[-6000:]
    assert finished.stdout.count("fault: ") == len(plan), "every fault has struck"
    return finished.stderr


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_disturbed_workers_end_as_if_nothing_had_happened(tmp_path, undisturbed_workers, workers):
    said = run(tmp_path, workers, PLANS[workers])
    assert_as_undisturbed(undisturbed_workers(workers), tmp_path, workers, said)


def test_a_signal_to_one_worker_saves_and_ends_all(tmp_path, undisturbed_workers):
    told = {"rank": 1, "at": "on_train_batch_end", "count": 4, "do": "SIGTERM"}
    run(tmp_path, 2, [told], code=75)
    assert len(list((tmp_path / "checkpoints").glob("ckpt-*"))) == 2, "after step 3, and after the signal"
    said = run(tmp_path, 2, [])
    assert_as_undisturbed(undisturbed_workers(2), tmp_path, 2, said)


def test_fewer_workers_take_over_what_more_have_saved(tmp_path, undisturbed_workers):
    told = {"rank": 0, "at": "on_train_batch_end", "count": 9, "do": "SIGTERM"}
    run(tmp_path, 2, [told], code=75)
    run(tmp_path, 1, [])
    (result,) = results(tmp_path, 1)
    expected = results(undisturbed_workers(2), 2)[0]
    assert result["epochs"].tolist() == expected["epochs"].tolist() and len(result["rows"]) == len(expected["rows"])
    # The first epoch was theirs; after that one replica draws other masks of dropout.
    assert result["history loss"][0] == expected["history loss"][0]
    assert abs(result["history val_loss"][-1] - expected["history val_loss"][-1]) < 0.5
