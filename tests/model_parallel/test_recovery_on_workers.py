"""FailureRecovery where stages are on workers: who writes what, other layouts, damage, and lost workers.

One program (`recovery_on_workers.py`) and its two workers make all trainings.
"""

from pathlib import Path
from typing import Any

import pytest
from launched_runs import launch_once

pytestmark = [pytest.mark.multi_process, pytest.mark.long]  # tests/chaos/test_stages.py recovers on workers, too
FOLDER = Path(__file__).parent
PATHS = [FOLDER, FOLDER.parent / "pipeline"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = FOLDER / "recovery_on_workers.py"
    run = launch_once(
        tmp_path_factory,
        "recovery on workers",
        script,
        options=["--workers", "1"],
        paths=PATHS,
    )
    return {**run.assert_complete().json("results.json"), "log": run.output}


def test_each_worker_writes_what_is_on_its_device(results: dict[str, Any]) -> None:
    files = {file: dict(tensors) for file, tensors in results["files"].items()}
    assert set(files) == {"worker-0.index", "worker-1.index"}
    assert not set(files["worker-0.index"]) & set(files["worker-1.index"])
    assert "weights/2.Dense/0" in files["worker-0.index"] and "weights/5.Dense/0" in files["worker-1.index"]
    assert {shape for file in files.values() for shape in file.values()} == {
        "[]",
        "[2]",
        "[12]",
        "[16]",
        "[12, 16]",
        "[16, 12]",
    }
    # The scalars of the optimizer.
    assert results["chief tensors"] == ["optimizer/0.Adam/0", "optimizer/0.Adam/1"]


@pytest.mark.parametrize("files", ["intact", "damaged", "missing"])
def test_an_interrupted_training_resumes_bit_identically(results: dict[str, Any], files: str) -> None:
    assert results["interruption"] == "RuntimeError: interrupted"
    assert results[files] == [True, True]  # the History, and all variables
    assert set(results["statuses"]) == {"complete"}


def test_a_damaged_file_of_a_worker_is_skipped_with_the_reason(results: dict[str, Any]) -> None:
    skipped = "FailureRecovery skips a checkpoint: ckpt-0000000003: "
    assert f"{skipped}worker-1.data-00000-of-00001 is not what was written: its checksum differs" in results["log"]
    assert f"{skipped}worker-0.index is missing" in results["log"]


@pytest.mark.parametrize(
    "layout", ["two columns", "the workers exchanged", "this process", "both", "from this process"]
)
def test_every_layout_restores_the_same_state(results: dict[str, Any], layout: str) -> None:
    assert results[layout] is True


def test_columns_share_the_writing(results: dict[str, Any]) -> None:
    first, second = results["sizes of two columns"]
    assert abs(first - second) <= 12 * 16 * 4  # bytes of the largest variable


def test_a_file_that_was_damaged_before_its_checksum_is_named(results: dict[str, Any]) -> None:
    assert results["torn"].startswith("CheckpointError: A worker could not read its part of a checkpoint.")
    assert "Received: DataLossError of /job:worker/replica:0/task:" in results["torn"]


def test_a_directory_that_is_not_shared_is_named_before_the_training(results: dict[str, Any]) -> None:
    assert results["not shared"].startswith("CheckpointError: A worker does not see the directory of the checkpoints.")
    assert "/job:worker/replica:0/task:0. Expected" in results["not shared"]


def test_a_worker_that_is_frozen_or_lost_in_a_save_is_named(results: dict[str, Any]) -> None:
    frozen, killed = results["frozen"], results["killed"]
    assert frozen.startswith("CheckpointError: A worker did not write its part of a checkpoint within 10 s.")
    assert "no answer of /job:worker/replica:0/task:1." in frozen
    assert killed.startswith("CheckpointError: A worker was lost while it had to write its part of a checkpoint.")
    assert "/job:worker/replica:0/task:1" in killed
    for name in ("frozen", "killed"):  # the save before is intact, this one is not there
        assert [status for status in results[f"{name} statuses"] if status != "unfinished"] == ["complete"]
