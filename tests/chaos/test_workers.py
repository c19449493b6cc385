"""Workers that are killed, frozen or fail at every kind of moment end with the weights of the undisturbed run."""

import re
import shutil

import numpy as np
import pytest
import worker_runs
from worker_runs import assert_as_undisturbed, command, first_steps, results

from tfdist.checkpoint import CheckpointStore
from tfdist.host_storage.host_store import HostStore
from tfdist.recovery.resharding import group_by_variable, merge_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(2700)]

# By name: kind and workers; a fault for each attempt, the last a signal that ends the run; the first steps, from 0, of
# these attempts and of the following run. Every third step saves. At least every second attempt makes progress, or
# `tfdist run` gives up. A signal to one of several workers takes effect after the next step.
TRAININGS = {
    "2 workers": (
        ("workers", 2),
        [
            {"rank": 1, "at": "train_step", "count": 5, "do": "SIGSTOP", "after_save": 3},
            {"rank": 1, "at": "fsync", "count": 1, "do": "SIGKILL"},  # of the save after step 6
            {"rank": 1, "at": "on_train_batch_end", "count": 7, "do": "SIGTERM"},
        ],
        [0, 3, 3, 11],
    ),
    "2 workers, more faults": (
        ("workers", 2),
        [
            {"rank": 1, "at": "train_step", "count": 5, "do": "SIGSTOP", "after_save": 3},
            {"rank": 0, "at": "restore", "count": 1, "do": "SIGKILL"},
            {"rank": 1, "at": "fsync", "count": 1, "do": "ENOSPC"},  # of the save after step 6; found at the next
            {"rank": 1, "at": "fsync", "count": 1, "do": "SIGKILL"},  # of the same save
            {"rank": 1, "at": "on_train_batch_end", "count": 7, "do": "SIGTERM"},
        ],
        [0, None, 3, 3, 3, 11],
    ),
    "2 workers, a kill": (  # contained in the others; ends within an epoch and an accumulation, as the first
        ("workers", 2),
        [
            {"rank": 1, "at": "on_train_batch_end", "count": 5, "do": "SIGKILL", "after_save": 3},
            {"rank": 0, "at": "on_train_batch_end", "count": 7, "do": "SIGTERM"},
        ],
        [0, 3, 11],
    ),
    "2 workers, other moments": (
        ("workers", 2),
        [
            {"rank": 0, "at": "on_train_batch_end", "count": 4, "do": "SIGUSR1"},
            {"rank": 0, "at": "train_step", "count": 5, "do": "raise", "after_save": 9},
            {"rank": 1, "at": "on_test_batch_end", "count": 2, "do": "SIGKILL", "after_save": 12},
            {"rank": 0, "at": "on_epoch_end", "count": 1, "do": "SIGKILL"},
            {"rank": 1, "at": "on_train_batch_end", "count": 4, "do": "SIGTERM"},
        ],
        [0, 5, 9, 12, 12, 17],
    ),
    "3 workers": (
        ("workers", 3),
        [
            {"rank": 0, "at": "on_train_batch_end", "count": 4, "do": "SIGUSR1"},
            {"rank": 2, "at": "on_train_batch_end", "count": 4, "do": "SIGKILL", "after_save": 6},
            {"rank": 1, "at": "train_step", "count": 5, "do": "SIGSTOP", "after_save": 9},
            {"rank": 2, "at": "train_step", "count": 4, "do": "raise", "after_save": 12},
            {"rank": 2, "at": "on_train_batch_end", "count": 4, "do": "SIGTERM"},
        ],
        [0, 5, 6, 9, 12, 17],
    ),
    "1 worker of 2 replicas": (
        ("replicas", 1),
        [
            {"rank": 0, "at": "fsync", "count": 7, "do": "SIGKILL"},  # of the second save
            {"rank": 0, "at": "train_step", "count": 19, "do": "SIGSTOP", "after_save": 12},  # two calls a step
            {"rank": 0, "at": "on_test_batch_end", "count": 2, "do": "SIGKILL"},
            {"rank": 0, "at": "train_step", "count": 9, "do": "raise", "after_save": 15},
            {"rank": 0, "at": "on_train_batch_end", "count": 1, "do": "SIGUSR1"},
            {"rank": 0, "at": "on_train_batch_end", "count": 1, "do": "SIGTERM"},
        ],
        [0, 3, 12, 12, 15, 16, 17],
    ),
}
MARKS = {"2 workers, a kill": pytest.mark.version_matrix}
NAMES = [pytest.param(name, marks=MARKS.get(name, pytest.mark.long)) for name in TRAININGS]
# Messages of the launcher. A signal to one worker has no failure that came first.
CAUSES = {
    "SIGKILL": "failed first: killed by SIGKILL",
    "SIGSTOP": "failed first: frozen: ",
    "ENOSPC": "No space left on device",
    "raise": "RuntimeError: on purpose",
    "SIGUSR1": "all workers saved and exited, although this command received no signal",
    "SIGTERM": "preempted: all workers saved and exited (exit code 75)",
}


def run(folder, kind, workers, plan=()):
    """Runs `on_workers.py` and returns the launcher's output."""
    restarts = max(len(plan) - 1, 0)
    options = ["--max-restarts", str(restarts), "--heartbeat-timeout", "5", *(["--warm-spares"] if restarts else [])]
    arguments, environ = command(folder, kind, workers, *options, plan=plan)
    return worker_runs.run(arguments, environ, plan=plan, code=75 if plan else 0)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """Called with a name and a folder, copies the training after all faults to it; returns the launcher's output."""
    known = {}

    def of(name, folder):
        if name not in known:
            (kind, workers), plan, _ = TRAININGS[name]
            original = tmp_path_factory.mktemp("disturbed")
            known[name] = original, run(original, kind, workers, plan)
        original, output = known[name]
        shutil.copytree(original, folder, dirs_exist_ok=True)
        return output

    return of


def newest(folder):
    checkpoint, skipped = CheckpointStore(folder / "checkpoints").newest()
    assert checkpoint is not None and not skipped
    return checkpoint


@pytest.mark.parametrize("name", NAMES)
def test_disturbed_workers_end_as_if_nothing_had_happened(tmp_path, disturbed, undisturbed_workers, name):
    (kind, workers), plan, first = TRAININGS[name]
    output = disturbed(name, tmp_path)
    assert newest(tmp_path).metadata["step"] == first[-1], "a signal to one worker saves and ends all"
    assert all(CAUSES[fault["do"]] in output for fault in plan), output
    failed = [int(rank) for rank in re.findall(r"^tfdist: worker (\d) failed first: ", output, re.MULTILINE)]
    faults = [fault for fault in plan if fault["do"] not in ("SIGUSR1", "SIGTERM")]
    # If one cannot write its part, all learn of it, and end at the same step.
    pairs = zip(failed, faults, strict=True)
    assert all(rank == fault["rank"] for rank, fault in pairs if fault["do"] != "ENOSPC"), output
    said = run(tmp_path, kind, workers)
    assert first_steps(tmp_path) == first, output
    assert_as_undisturbed(undisturbed_workers(workers, kind=kind), tmp_path, workers, said)


def test_fewer_workers_resume_from_a_checkpoint_of_more(tmp_path, disturbed, undisturbed_workers):
    """The checkpoint is in the middle of an accumulation and of an epoch."""
    disturbed("2 workers, a kill", tmp_path)
    checkpoint = newest(tmp_path)
    saved = group_by_variable(merge_ranks([checkpoint.read_rank(rank).tensors for rank in range(2)]))
    run(tmp_path, "workers", 1)
    taken = group_by_variable(dict(np.load(tmp_path / "first-state-0.npz")))
    summed = [name for name in taken if name.startswith("accumulators/") or name.endswith("residual")]
    assert len(summed) > 2 and set(summed) <= saved.keys()
    for name in summed:
        assert np.any(saved[name][0] != saved[name][1]), name
        np.testing.assert_array_equal(taken[name][0], saved[name][0] + saved[name][1], name)
    (result,) = results(tmp_path, 1)
    expected = results(undisturbed_workers(2), 2)[0]
    assert result["epochs"].tolist() == expected["epochs"].tolist() and len(result["rows"]) == len(expected["rows"])
    # Two workers trained the first epoch; after it one replica draws other dropout masks.
    assert result["history loss"][0] == expected["history loss"][0]
    assert abs(result["history val_loss"][-1] - expected["history val_loss"][-1]) < 0.5


def lost(rank, count, after_save, do="lose the disk"):
    return {"rank": rank, "at": "on_train_batch_end", "count": count, "do": do, "after_save": after_save}


# Disks are saved to every three steps, or memory is, and disks every nine.
@pytest.mark.parametrize(
    ("kind", "workers", "plan", "first"),
    [
        pytest.param("memory", 2, [lost(1, 5, 3)], [0, 3], id="a memory"),
        *(
            pytest.param(kind, workers, plan, first, marks=pytest.mark.long, id=name)
            for name, kind, workers, plan, first in (
                ("a disk", "own disks", 2, [lost(1, 5, 3)], [0, 3]),
                ("each disk", "own disks", 2, [lost(0, 5, 3), lost(1, 5, 6), lost(0, 4, 9)], [0, 3, 6, 9]),
                ("disks of three", "own disks", 3, [lost(2, 5, 3), lost(1, 5, 6), lost(0, 4, 9)], [0, 3, 6, 9]),
                (
                    "memory, then all of it",
                    "memory",
                    2,
                    [lost(0, 5, 3), lost(1, 8, 9, "lose all memory"), lost(1, 5, 12, "SIGKILL")],
                    [0, 3, 9, 12],
                ),
            )
        ),
    ],
)
def test_what_is_lost_comes_from_the_others(tmp_path, undisturbed_workers, kind, workers, plan, first):
    arguments, environ = command(
        tmp_path, kind, workers, "--max-restarts", str(len(plan)), "--restart-delay", "0", plan=plan
    )
    said = worker_runs.run(arguments, environ, plan=plan)
    assert first_steps(tmp_path) == first, said
    assert f"(worker {plan[0]['rank']}) had no shared.safetensors, rank-" in said
    assert_as_undisturbed(undisturbed_workers(workers), tmp_path, workers, said)
    for rank in range(workers):
        newest = HostStore(tmp_path / f"host-{rank}").list_checkpoints(verify_checksums=True)[-1]
        assert newest.status == "complete" and newest.metadata["step"] == 21
        assert not list((tmp_path / f"host-{rank}").glob(".[!l]*")), "only the lock is left"
