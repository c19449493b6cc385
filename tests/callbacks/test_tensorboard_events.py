"""EventLog: what TensorBoard reads, and how a restarted training continues it."""

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from tfdist.callbacks.training_monitor import EventLog

pytestmark = pytest.mark.usefixtures("cpus")


def written(directory, steps, training="one", **arguments):
    log = EventLog(str(directory), training, **arguments)
    for step in steps:
        log.write(step, {"tfdist/a": step / 2, "tfdist/b": 7.0}, {"tfdist/a": "what it is"})
    return log


def steps_of(accumulator, tag="tfdist/a"):
    accumulator.Reload()
    return [event.step for event in accumulator.Tensors(tag)]


def test_tensorboard_reads_it(tmp_path, curves):
    written(tmp_path / "new" / "directory", [1, 2])
    accumulator = EventAccumulator(str(tmp_path / "new" / "directory"))
    assert steps_of(accumulator) == steps_of(accumulator, "tfdist/b") == [1, 2], "at once: the file is not closed"
    metadata = accumulator.SummaryMetadata("tfdist/a")
    assert (metadata.plugin_data.plugin_name, metadata.summary_description) == ("scalars", "what it is")
    assert accumulator.Tags()["tensors"] == ["tfdist/a", "tfdist/b"]
    assert curves(tmp_path / "new" / "directory") == {
        "tfdist/a": [(1, 0.5), (2, 1.0)],
        "tfdist/b": [(1, 7.0), (2, 7.0)],
    }


def test_later_steps_are_removed_from_files_and_discarded_by_an_open_tensorboard(tmp_path, curves):
    written(tmp_path, [10, 20]).close()
    written(tmp_path, [30, 40], forget_after=20).close()
    written(tmp_path, [10], training="another").close()
    accumulator = EventAccumulator(str(tmp_path))
    before = steps_of(accumulator)
    assert before == [10, 20, 30, 40, 10]
    log = written(tmp_path, [], forget_after=15)
    assert [step for step, _ in curves(tmp_path)["tfdist/a"]] == [10, 10]
    assert steps_of(accumulator) == [10, 10]
    log.write(20, {"tfdist/a": 1.0}, {})
    assert steps_of(accumulator) == steps_of(EventAccumulator(str(tmp_path))) == [10, 10, 20]
    assert not list(tmp_path.glob("unfinished"))


def test_other_trainings_keep_their_steps(tmp_path, curves):
    written(tmp_path, [10, 20], training="another")
    written(tmp_path, [10], forget_after=0)
    assert [step for step, _ in curves(tmp_path)["tfdist/a"]] == [10, 20, 10]


@pytest.mark.parametrize("torn", [b"\x01", b"\xff" * 11, b"\x40" + b"\0" * 7 + b"x" * 20], ids=len)
def test_incomplete_record_of_a_killed_process_is_removed(tmp_path, torn, curves):
    written(tmp_path, [10, 20]).close()
    [path] = tmp_path.iterdir()
    complete = path.read_bytes()
    path.write_bytes(complete + torn)
    written(tmp_path, [30], forget_after=20)
    assert path.read_bytes() == complete
    assert [step for step, _ in curves(tmp_path)["tfdist/a"]] == [10, 20, 30]


def test_file_without_later_steps_is_not_rewritten(tmp_path):
    written(tmp_path, [10, 20]).close()
    [path] = tmp_path.iterdir()
    before = path.stat().st_ino
    written(tmp_path, [30], forget_after=20)
    assert path.stat().st_ino == before
