"""Workers that are killed, frozen or fail at every kind of moment end with the weights of the undisturbed run."""

import re
import shutil

import numpy as np
import pytest
import worker_runs
from worker_runs import assert_as_undisturbed, command, results

from tfdist.checkpoint import CheckpointStore
from tfdist.recovery.resharding import group_by_variable, merge_ranks

pytestmark = pytest.mark.multi_process

# By kind and workers. At least every second attempt makes progress, or `tfdist run` gives up.
PLANS = {
    ("workers", 2): [
        {"rank": 1, "at": "train_step", "count": 5, "do": "SIGSTOP"},
        {"rank": 0, "at": "restore", "count": 1, "do": "SIGKILL"},  # from the save after step 3
        {"rank": 1, "at": "on_test_batch_end", "count": 2, "do": "SIGKILL"},
        {"rank": 1, "at": "fsync", "count": 1, "do": "SIGKILL"},  # of the save after step 9
        {"rank": 1, "at": "fsync", "count": 1, "do": "ENOSPC"},  # of the same save; found at the next
        {"rank": 0, "at": "train_step", "count": 5, "do": "raise"},
        {"rank": 0, "at": "on_epoch_end", "count": 1, "do": "SIGKILL"},
    ],
    ("workers", 3): [
        {"rank": 2, "at": "on_train_batch_end", "count": 9, "do": "SIGKILL"},
        {"rank": 1, "at": "train_step", "count": 5, "do": "SIGSTOP"},
        {"rank": 2, "at": "train_step", "count": 4, "do": "raise"},
    ],
    ("replicas", 1): [
        {"rank": 0, "at": "fsync", "count": 7, "do": "SIGKILL"},
        {"rank": 0, "at": "train_step", "count": 19, "do": "SIGSTOP"},  # two calls a step
        {"rank": 0, "at": "on_test_batch_end", "count": 2, "do": "SIGKILL"},
        {"rank": 0, "at": "train_step", "count": 9, "do": "raise"},
    ],
}
# Messages of the launcher.
CAUSES = {
    "SIGKILL": "failed first: killed by SIGKILL",
    "SIGSTOP": "failed first: frozen: ",
    "ENOSPC": "No space left on device",
    "raise": "RuntimeError: on purpose",
}
# In the middle of an accumulation and of an epoch, and not a step that saves anyway.
STOP_STEP = 11
KINDS = [
    pytest.param(*key, marks=[] if key == ("workers", 2) else pytest.mark.long, id=f"{key[1]} {key[0]}")
    for key in PLANS
]


def run(folder, workers, plan=(), *, kind="workers", code=0):
    """Runs `on_workers.py` and returns the launcher's output."""
    restarts = 0 if code else len(plan)
    options = ["--max-restarts", str(restarts), "--heartbeat-timeout", "3", *(["--warm-spares"] if restarts else [])]
    arguments, environ = command(folder, kind, workers, *options, plan=plan)
    return worker_runs.run(arguments, environ, plan=plan, code=code)


@pytest.fixture(scope="module")
def ended_by_signals(tmp_path_factory):
    """A copy of the folder of a training that was preempted by a signal to one worker, then to another."""
    known = {}

    def of(kind, workers, folder):
        if (kind, workers) not in known:
            known[kind, workers] = ended = tmp_path_factory.mktemp("ended") / "folder"
            done = 0
            for rank, number, step in ((0, "SIGUSR1", 5), (workers - 1, "SIGTERM", STOP_STEP)):
                count = step - done - (workers > 1)  # several workers stop after their next common step
                fault = {"rank": rank, "at": "on_train_batch_end", "count": count, "do": number}
                run(ended, workers, [fault], kind=kind, code=75)
                done = newest(ended).metadata["step"]
                assert done == step
        return shutil.copytree(known[kind, workers], folder / "copy")

    return of


def newest(folder):
    checkpoint, skipped = CheckpointStore(folder / "checkpoints").newest()
    assert checkpoint is not None and not skipped
    return checkpoint


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_disturbed_workers_end_as_if_nothing_had_happened(tmp_path, undisturbed_workers, kind, workers):
    plan = PLANS[kind, workers]
    output = run(tmp_path, workers, plan, kind=kind)
    assert_as_undisturbed(undisturbed_workers(workers, kind=kind), tmp_path, workers, output)
    assert all(CAUSES[fault["do"]] in output for fault in plan), output
    first = [int(rank) for rank in re.findall(r"^tfdist: worker (\d) failed first: ", output, re.MULTILINE)]
    # If one cannot write its part, all learn of it, and end at the same step.
    pairs = zip(first, plan, strict=True)
    assert all(rank == fault["rank"] for rank, fault in pairs if fault["do"] != "ENOSPC"), output


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_a_signal_to_one_worker_saves_and_ends_all(tmp_path, ended_by_signals, undisturbed_workers, kind, workers):
    folder = ended_by_signals(kind, workers, tmp_path)
    output = run(folder, workers, kind=kind)
    assert_as_undisturbed(undisturbed_workers(workers, kind=kind), folder, workers, output)


def test_fewer_workers_resume_from_a_checkpoint_of_more(tmp_path, ended_by_signals, undisturbed_workers):
    folder = ended_by_signals("workers", 2, tmp_path)
    checkpoint = newest(folder)
    saved = group_by_variable(merge_ranks([checkpoint.read_rank(rank).tensors for rank in range(2)]))
    run(folder, 1)
    taken = group_by_variable(dict(np.load(folder / "first-state-0.npz")))
    summed = [name for name in taken if name.startswith("accumulators/") or name.endswith("residual")]
    assert len(summed) > 2 and set(summed) <= saved.keys()
    for name in summed:
        assert np.any(saved[name][0] != saved[name][1]), name
        np.testing.assert_array_equal(taken[name][0], saved[name][0] + saved[name][1], name)
    (result,) = results(folder, 1)
    expected = results(undisturbed_workers(2), 2)[0]
    assert result["epochs"].tolist() == expected["epochs"].tolist() and len(result["rows"]) == len(expected["rows"])
    # Two workers trained the first epoch; after it one replica draws other dropout masks.
    assert result["history loss"][0] == expected["history loss"][0]
    assert abs(result["history val_loss"][-1] - expected["history val_loss"][-1]) < 0.5
