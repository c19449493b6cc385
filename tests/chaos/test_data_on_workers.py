"""Two workers train on each kind of data, one after the other, and are killed during each."""

import json
from pathlib import Path

import pytest
import worker_runs
from on_workers_by_data import EPOCHS, KINDS, LOADERS
from optional_packages import require
from training import NAN_STEP, STEPS
from worker_runs import assert_as_undisturbed, counting_steps, launcher

from tfdist.checkpoint import CheckpointStore

SCRIPT = Path(__file__).with_name("on_workers_by_data.py")
pytestmark = [pytest.mark.multi_process, pytest.mark.long, pytest.mark.timeout(2700)]
PLAN = [
    {"data": "arrays", "rank": 1, "at": "on_train_batch_end", "count": 5, "do": "SIGKILL", "after_save": 3},
    {"data": "arrays", "rank": 0, "at": "on_train_batch_end", "count": 7, "do": "SIGKILL", "after_save": 9},
    {"data": "PyDataset", "rank": 0, "at": "on_train_batch_end", "count": STEPS + 4, "do": "SIGKILL", "after_save": 9},
    {"data": "generator", "rank": 1, "at": "on_train_batch_end", "count": STEPS + 1, "do": "SIGKILL", "after_save": 6},
    *(
        {"data": kind, "rank": 0, "at": "on_train_batch_end", "count": STEPS + 4, "do": "SIGKILL", "after_save": 9}
        for kind in LOADERS
        if kind in KINDS
    ),
]


def run(folder, plan=()):
    restarts = ["--max-restarts", str(len(plan))]
    return worker_runs.run(*launcher(2, restarts, SCRIPT, folder, json.dumps(plan)), plan=plan)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder)
    return folder


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disturbed")
    return folder, run(folder, PLAN)


@pytest.mark.parametrize("kind", dict.fromkeys([*KINDS, *LOADERS]))
def test_each_kind_resumes_at_its_position(undisturbed, disturbed, kind):
    require(*LOADERS.get(kind, "").split())
    folder, said = disturbed
    assert_as_undisturbed(undisturbed / kind, folder / kind, 2, said)
    steps = [[step for step, _ in counting] for counting in counting_steps(folder / kind, 2)]
    assert steps == [[[epoch, step] for epoch in range(EPOCHS) for step in range(STEPS)]] * 2


def test_a_loss_that_is_not_finite_on_one_worker_ends_both(disturbed):
    folder, said = disturbed
    checkpoint, _ = CheckpointStore(folder / "NaN" / "checkpoints").newest()
    assert checkpoint.metadata["step"] == NAN_STEP - 1 and checkpoint.num_ranks == 2
    assert said.count("TerminateOnNaN has ended the training, which is not marked as complete") == 1
    assert [counting[-1][0] for counting in counting_steps(folder / "NaN", 2)] == [[0, NAN_STEP - 1]] * 2
