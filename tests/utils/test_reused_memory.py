"""Memory is used again, but never while anything uses it."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.utils.reused_memory import ReusedMemory

pytestmark = pytest.mark.usefixtures("cpus")
SHAPE, BYTES = [256, 256], 2**18


def address(array):
    return array.__array_interface__["data"][0]


def view(array):
    return array[3:, ::2].T


def buffer(array):
    return memoryview(array)


def of_python_function(array):
    """A tensor in the memory of the array, of which only a slice is left."""
    return tf.function(lambda: tf.numpy_function(lambda: array, [], tf.float32)[:128])()


def through_dlpack(array):
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


@pytest.mark.parametrize("use", [view, buffer, tf.constant, of_python_function, through_dlpack])
def test_memory_in_use_is_not_given_out(use):
    memory = ReusedMemory(most_bytes=4 * BYTES)
    array = memory.empty(SHAPE, np.float32)
    array[...] = 1.0
    used = use(array)
    del array
    others = [memory.empty(SHAPE, np.float32) for _ in range(3)]
    for other in others:
        other[...] = 2.0
    assert np.all(np.asarray(used) == 1.0)


def test_an_unused_array_is_given_out_again_also_for_another_dtype_and_shape():
    memory = ReusedMemory(most_bytes=2**24)
    addresses = set()
    for shape, dtype in [([256, 256], "f4"), ([65536], "f4"), ([256, 4, 128], "f2"), ([256, 255], "i4")] * 3:
        array = memory.empty(shape, dtype)
        assert array.shape == tuple(shape) and array.dtype == dtype and address(array) % 64 == 0
        addresses.add(address(array))
        del array
    assert len(addresses) == 1


@pytest.mark.parametrize("shape", [[], [0, 5], [3], [1000, 1000]])
def test_arrays_that_are_not_kept(shape):
    memory = ReusedMemory(most_bytes=2**20)
    array = memory.empty(shape, np.float64)
    assert array.shape == tuple(shape) and (address(array) % 64 == 0 or not array.size)
    assert memory._kept_bytes == 0


def test_kept_memory_is_bounded():
    memory = ReusedMemory(most_bytes=8 * BYTES)
    held = [memory.empty(SHAPE, np.float32) for _ in range(50)]
    for rows in range(100, 1000, 7):
        memory.empty([rows, 256], np.float32)
        kept = sum(block.nbytes for blocks in memory._blocks.values() for block, _ in blocks)
        assert kept == memory._kept_bytes <= 8 * BYTES
    for index, array in enumerate(held):
        array[...] = index
    assert [float(array.max()) for array in held] == list(range(50))


def test_threads_share_it():
    memory, wrong = ReusedMemory(most_bytes=8 * BYTES), []

    def fill(number):
        for _ in range(300):
            array = memory.empty(SHAPE, np.int32)
            array[...] = number
            if not np.all(array == number):
                wrong.append(number)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
