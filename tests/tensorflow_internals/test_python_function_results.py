"""What Python functions return to TensorFlow is copied: kernels write into slices of an array otherwise."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist.tensorflow_internals import python_function_results
from tfdist.tensorflow_internals.python_function_results import copy_results_of_python_functions

pytestmark = pytest.mark.usefixtures("cpus")
ROWS, COLUMNS = 64, 32


@pytest.fixture(autouse=True)
def copies():
    copy_results_of_python_functions()


def aligned(dtype="float32"):
    """An array of -1 that TensorFlow takes without a copy."""
    itemsize = np.dtype(dtype).itemsize
    memory = np.empty(ROWS * COLUMNS * itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + ROWS * COLUMNS * itemsize].view(dtype).reshape(ROWS, COLUMNS)
    array[...] = np.array(-1).astype(dtype)
    return array


def from_numpy_function(array):
    return tf.numpy_function(lambda: array, [], tf.float32)


def of_tensor(array):
    """Returns a tensor in the memory of the array."""
    return tf.py_function(lambda: tf.ensure_shape(array, array.shape), [], tf.float32)


def drawn(array):
    spec = tf.TensorSpec(array.shape)
    return next(iter(tf.data.Dataset.from_generator(lambda: iter([array]), output_signature=spec)))


SOURCES = {
    "numpy_function": from_numpy_function,
    "py_function": of_tensor,
    "from_generator": drawn,
    "several results": lambda array: tf.numpy_function(lambda: (array, array), [], [tf.float32] * 2)[1],
}


def changed_values(source):
    """How many values of an array change while two slices are computed with."""
    array = aligned()

    @tf.function
    def step():
        batch = tf.ensure_shape(source(array), array.shape)
        return [tf.reduce_sum(tf.abs(part)) for part in (batch[: ROWS // 2], batch[ROWS // 2 :])]

    for _ in range(3):
        step()
    return np.sum(array != -1)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_kernels_do_not_write_into_arrays(source, monkeypatch):
    assert changed_values(source) == 0
    monkeypatch.setattr(python_function_results, "_copied", lambda result: result)
    assert changed_values(source) > 0  # without this, a newer TensorFlow needs no copies


@pytest.mark.parametrize(
    "dtype", ["float32", "bool", "int64", ml_dtypes.bfloat16, "complex64", "uint8", ml_dtypes.float8_e5m2]
)
def test_copies_are_equal_and_taken_without_another_copy(dtype):
    array = aligned(dtype)
    array[3:] = 1
    for result in (array, array[1:], np.asfortranarray(array), array[:1]):
        copy = python_function_results._copied(result)
        assert copy.dtype == result.dtype and copy.ctypes.data % 64 == 0
        assert copy.tobytes() == result.tobytes()
        assert not np.shares_memory(copy, result)


def test_other_results_are_passed_on():
    text = np.array([[b"a", b"bcd"]], dtype=object)
    ragged = tf.ragged.constant([[1, 2], [3]])
    spec = (tf.TensorSpec([1, 2], tf.string), tf.RaggedTensorSpec([2, None], tf.int32), tf.TensorSpec([], tf.int64))
    data = tf.data.Dataset.from_generator(lambda: iter([(text, ragged, 7)]), output_signature=spec)
    words, rows, number = next(iter(data))
    assert words.numpy().tolist() == text.tolist()
    assert rows.to_list() == [[1, 2], [3]]
    assert int(number) == 7
    tf.numpy_function(lambda: None, [], [])
    tf.py_function(lambda: None, [], [])


def test_gradients_of_py_function_are_kept():
    values = tf.Variable([1.0, 2.0])
    square = tf.function(lambda: tf.reduce_sum(tf.py_function(tf.square, [values], tf.float32)))
    for function in (square, square.python_function):
        with tf.GradientTape() as tape:
            result = function()
        assert tape.gradient(result, values).numpy().tolist() == [2.0, 4.0]
