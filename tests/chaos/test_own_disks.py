"""Workers that are killed and lose their disks end with the weights of the undisturbed run."""

import pytest
from worker_runs import assert_as_undisturbed, command, first_steps, run

from tfdist.host_storage.host_store import HostStore

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(2700)]


def lost(rank, count, after_save):
    return {"rank": rank, "at": "on_train_batch_end", "count": count, "do": "lose the disk", "after_save": after_save}


@pytest.mark.parametrize(
    ("workers", "plan", "first"),
    [
        (2, [lost(1, 5, 3)], [0, 3]),
        pytest.param(2, [lost(0, 5, 3), lost(1, 5, 6), lost(0, 4, 9)], [0, 3, 6, 9], marks=pytest.mark.long),
        pytest.param(3, [lost(2, 5, 3), lost(1, 5, 6), lost(0, 4, 9)], [0, 3, 6, 9], marks=pytest.mark.long),
    ],
)
def test_a_lost_disk_loses_nothing(tmp_path, undisturbed_workers, workers, plan, first):
    arguments, environ = command(
        tmp_path, "own disks", workers, "--max-restarts", str(len(plan)), "--restart-delay", "0", plan=plan
    )
    said = run(arguments, environ, plan=plan)
    assert first_steps(tmp_path) == first, said
    assert f"(worker {plan[0]['rank']}) had no shared.safetensors, rank-" in said
    assert_as_undisturbed(undisturbed_workers(workers), tmp_path, workers, said)
    for rank in range(workers):
        newest = HostStore(tmp_path / f"host-{rank}").list_checkpoints(verify_checksums=True)[-1]
        assert newest.status == "complete" and newest.metadata["step"] == 21
        assert not list((tmp_path / f"host-{rank}").glob(".[!l]*")), "only the lock is left"
