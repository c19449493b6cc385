"""Variables that are copied, written and read on the device of a task; here this process stands for a worker."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.checkpoint import CheckpointError
from tfdist.checkpoint.sharded_save import record_worker_files
from tfdist.recovery import variable_copies, worker_calls
from tfdist.recovery.variable_copies import WorkerCopies
from tfdist.recovery.worker_tensors import assign_all, open_worker_tensors
from tfdist.tensor_parallel.split_variable import SplitVariable


@pytest.fixture
def copies(cpus: list[str], monkeypatch: pytest.MonkeyPatch) -> WorkerCopies:
    monkeypatch.setattr(variable_copies, "own_task", lambda: "/job:chief/task:0")
    return WorkerCopies(30.0)


@pytest.fixture
def variables(cpus: list[str]) -> dict[str, tf.Variable]:
    with tf.device(cpus[1]):
        values = {"kernel": np.ones((3, 2), "float32"), "count": np.int64(7), "flag": True, "empty": np.zeros((0, 3))}
        return {name: tf.Variable(value) for name, value in values.items()} | {
            "half": tf.Variable(tf.constant([0.1, 3.0], tf.bfloat16)),
            "scale": tf.Variable(tf.cast(tf.constant([0.5, 3.0]), tf.dtypes.experimental.float8_e4m3fn)),
        }


def saved(bundles: Any, directory: Path) -> dict[str, Any]:
    checkpoint: Any = SimpleNamespace(path=directory)
    return open_worker_tensors(checkpoint, bundles.description, 30.0)


def test_copies_have_the_values_of_their_request(copies: WorkerCopies, variables: Any, tmp_path: Path) -> None:
    for number in range(2):  # the second snapshot uses the same functions
        expected = {name: variable.numpy() for name, variable in variables.items()}
        assert [copies.request(name, variable) for name, variable in variables.items()] == [None] * 6
        bundles = copies.copy_on_workers()
        assert bundles is not None and bundles.size_bytes == 3 * 2 * 4 + 8 + 1 + 2 * 2 + 2
        variables["kernel"].assign_add(tf.ones([3, 2]))
        variables["count"].assign(0)
        (tmp_path / str(number)).mkdir()
        sizes = bundles.write(tmp_path / str(number))
        assert sizes == {"localhost-0.data-00000-of-00001": bundles.size_bytes, "localhost-0.index": None}
        found = saved(bundles, tmp_path / str(number))
        assign_all([(variable, found[name]) for name, variable in variables.items()])
        for name, variable in variables.items():
            np.testing.assert_array_equal(variable.numpy(), expected[name])
        assert found["half"].dtype.name == "bfloat16" and found["kernel"].shape == (3, 2)


def test_strings_have_no_fixed_size(copies: WorkerCopies, cpus: list[str], tmp_path: Path) -> None:
    with tf.device(cpus[1]):
        variable = tf.Variable(["a", "bcd"])
    copies.request("words", variable)
    bundles = copies.copy_on_workers()
    assert bundles is not None
    sizes = bundles.write(tmp_path)
    assert sizes == {"localhost-0.data-00000-of-00001": None, "localhost-0.index": None}
    record_worker_files(tmp_path, sizes)
    variable.assign(["", ""])
    assign_all([(variable, saved(bundles, tmp_path)["words"])])
    assert variable.numpy().tolist() == [b"a", b"bcd"]


def test_many_workers_cause_no_warning_of_retracing(
    copies: WorkerCopies,
    cpus: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TensorFlow warns from the fifth function on that is traced for the same Python code in a row."""
    tf.get_logger().addHandler(caplog.handler)
    for number in range(6):
        with tf.device(cpus[1]):
            variable = tf.Variable(float(number))
        copies.request("value", variable)
        bundles = copies.copy_on_workers()
        assert bundles is not None
        (directory := tmp_path / str(number)).mkdir()
        bundles.write(directory)
        found = saved(bundles, directory)["value"]
        assign_all([(variable, found)])
        assert np.asarray(found) == number
        worker_calls.check_shared_directory(directory, {worker_calls.own_task(): variable.device}, 30.0)
    tf.get_logger().removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "retracing" in record.getMessage()]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="No checkpoint can be written. Received: .*Not a directory.* Expected: "):
        worker_calls.check_shared_directory(tmp_path / "file" / "checkpoints", {}, 30.0)


def test_values_can_be_read_as_arrays(copies: WorkerCopies, variables: Any, tmp_path: Path) -> None:
    copies.request("kernel", variables["kernel"])
    copies.request("count", variables["count"])
    bundles = copies.copy_on_workers()
    assert bundles is not None
    bundles.write(tmp_path)
    found = saved(bundles, tmp_path)
    np.testing.assert_array_equal(np.asarray(found["kernel"]), np.ones((3, 2)))
    assert np.asarray(found["count"]) == 7


def test_padding_of_split_variables_is_not_written_and_stays(
    copies: WorkerCopies, cpus: list[str], tmp_path: Path
) -> None:
    """Five rows: over four devices the third part has one of two, and the fourth one none."""
    values = np.arange(10.0).reshape(5, 2)

    def split(value: np.ndarray, ways: int) -> SplitVariable:
        with tf.device(cpus[0]):
            return SplitVariable(tf.Variable(value), 0, [cpus[:ways]])

    held = split(values, 4)
    assert [part.numpy().tolist() for part in held.shards[2:]] == [[[8.0, 9.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    assert copies.request("table", held) is None
    bundles = copies.copy_on_workers()
    assert bundles is not None
    bundles.write(tmp_path)
    found = saved(bundles, tmp_path)
    np.testing.assert_array_equal(np.asarray(found["table"]), values)
    for ways in (4, 3, 2):
        other = split(np.zeros_like(values), ways)
        for part in other.shards:
            part.assign(tf.fill(part.shape, tf.constant(-1.0, tf.float64)))
        assign_all([(other, found["table"])])
        np.testing.assert_array_equal(other.numpy(), values)
        padding = np.concatenate([part.numpy() for part in other.shards])[5:]
        assert padding.size and np.all(padding == -1.0)


def test_nothing_is_returned_to_this_process_and_copies_are_released(
    copies: WorkerCopies, variables: Any, tmp_path: Path
) -> None:
    copies.request("kernel", variables["kernel"])
    bundles = copies.copy_on_workers()
    assert bundles is not None and copies.copy_on_workers() is None
    (bundle,) = bundles._bundles.values()
    assert bundle.traced_copy.outputs == []
    assert [copy.read_value().shape for copy in bundle._copies] == [(3, 2)]
    bundles.write(tmp_path)
    assert [copy.read_value().shape for copy in bundle._copies] == [(0,)]


def test_copies_of_columns_are_written_where_least_is_written(copies: WorkerCopies) -> None:
    def variable(size: int) -> Any:
        placed = [
            SimpleNamespace(device=f"/job:worker/task:{task}/device:CPU:0", shape=tf.TensorShape([size]), dtype=tf.int8)
            for task in range(2)
        ]
        placed[0].copies = placed[1:]
        return placed[0]

    for name, size in {"a": 5, "b": 3, "c": 1, "d": 4}.items():
        copies.request(name, variable(size))
    found = {task: [one.name for one in saved] for task, saved in copies._requested.items()}
    assert found == {"/job:worker/task:0": ["a"], "/job:worker/task:1": ["b", "c", "d"]}


def test_variables_of_this_process_are_copied_to_host_memory(cpus: list[str]) -> None:
    copies, variable = WorkerCopies(30.0), tf.Variable([1.0])
    array = copies.request("a", variable)
    copies.finish()
    assert copies.copy_on_workers() is None
    np.testing.assert_array_equal(array, [1.0])


def test_a_damaged_file_is_an_error_with_the_task(copies: WorkerCopies, variables: Any, tmp_path: Path) -> None:
    copies.request("kernel", variables["kernel"])
    bundles = copies.copy_on_workers()
    assert bundles is not None
    bundles.write(tmp_path)
    file = tmp_path / "localhost-0.data-00000-of-00001"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    value = saved(bundles, tmp_path)["kernel"]
    with pytest.raises(CheckpointError, match=r"could not read its part .* DataLossError of /job:localhost.* Checksum"):
        assign_all([(variables["kernel"], value)])
    np.testing.assert_array_equal(variables["kernel"].numpy(), np.ones((3, 2)))
