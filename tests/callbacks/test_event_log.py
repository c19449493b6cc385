"""EventLog: what TensorBoard reads of it, and how a training that is started again goes on with it."""

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from tfdist.callbacks.event_log import EventLog

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


def test_later_steps_are_forgotten_in_the_files_and_by_a_tensorboard_that_is_open(tmp_path, curves):
    written(tmp_path, [10, 20]).close()
    written(tmp_path, [30, 40], forget_after=20).close()
    written(tmp_path, [10], training="another").close()
    accumulator = EventAccumulator(str(tmp_path))
    open_since_before = steps_of(accumulator)
    assert open_since_before == [10, 20, 30, 40, 10]
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
def test_a_record_that_a_killed_process_has_left_unfinished_is_taken_out(tmp_path, torn, curves):
    written(tmp_path, [10, 20]).close()
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    written(tmp_path, [30], forget_after=20)
    assert path.read_bytes() == whole
    assert [step for step, _ in curves(tmp_path)["tfdist/a"]] == [10, 20, 30]


def test_a_file_without_later_steps_stays_the_same_file(tmp_path):
    written(tmp_path, [10, 20]).close()
    [path] = tmp_path.iterdir()
    before = path.stat().st_ino
    written(tmp_path, [30], forget_after=20)
    assert path.stat().st_ino == before
