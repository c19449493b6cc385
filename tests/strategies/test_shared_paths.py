"""Files that two workers write to the same paths, in a program that was written for one process."""

import csv

import pytest

pytestmark = pytest.mark.multi_process


@pytest.fixture(scope="module")
def seen(workers_of_two_devices):
    """The observations of each rank of one run."""
    return [workers_of_two_devices.json(f"shared/files-{rank}.json") for rank in range(2)]


@pytest.fixture(scope="module")
def folder(workers_of_two_devices, seen):
    """The directory that the workers share."""
    return workers_of_two_devices.folder / "shared"


@pytest.mark.parametrize("way", "keras h5 weights sharded directory export saved_model checkpoint manager".split())
def test_what_a_worker_has_saved_is_complete_while_others_save(seen, way):
    assert [rank["saves"][way] for rank in seen] == [[], []]


def test_saves_return_what_they_return_in_one_process(seen, folder):
    assert [rank["saves"]["returned"] for rank in seen] == [[str(folder / "returned"), str(folder / "numbered-5")]] * 2
    assert [rank["saves"]["kept"] for rank in seen] == [["ckpt-3", "ckpt-4"]] * 2
    assert {path.name for path in (folder / "managed").iterdir()} >= {"checkpoint", "ckpt-3.index", "ckpt-4.index"}


def test_no_worker_asks_about_a_file_that_another_one_has_just_written(seen, folder):
    assert [rank["saves"]["asked"] for rank in seen] == [None, None]
    assert (folder / "once.keras").exists()


def test_a_save_leaves_no_other_files(folder):
    assert [path for path in folder.rglob(".*")] == []


def test_the_best_model_is_read_by_all_workers_after_fit(seen):
    assert [rank["fits"]["best"] for rank in seen] == [0.0, 0.0]


def test_all_workers_continue_from_the_backup_which_is_removed_at_the_end(seen, folder):
    assert [rank["fits"]["interrupted"] for rank in seen] == ["InterruptedError: "] * 2
    assert [rank["fits"]["epochs"] for rank in seen] == [[2, 3], [2, 3]]
    assert not (folder / "backup").exists()


def test_the_chief_writes_a_log(seen, folder):
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    # One for each of four trainings; the name contains the host and the process.
    events = [path.name for path in (folder / "board" / "train").glob("events.out.tfevents.*")]
    assert len(events) == 4
    assert all(f".{seen[0]['process']}." in name for name in events)


def test_paths_of_one_worker_are_written_by_it(folder):
    for rank in range(2):
        assert (folder / f"log-{rank}.csv").read_text().splitlines()[0] == "epoch,loss,val_loss"
        assert (folder / f"model-{rank}.keras").exists()
    assert (folder / "alone.keras").exists()
    assert len((folder / "chief.csv").read_text().splitlines()) == 3


def test_callbacks_have_their_paths_after_fit(seen):
    assert [rank["fits"]["paths"] for rank in seen] == [["log.csv", "board", "backup"]] * 2


def test_backups_of_different_epochs_are_an_error_on_all_workers(seen):
    assert seen[0]["fits"]["differing"] == seen[1]["fits"]["differing"]
    assert "epoch 2 after 4 updates on worker 0, epoch 1 after 4 updates on worker 1" in seen[0]["fits"]["differing"]
