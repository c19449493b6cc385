"""Memory is used again, but never while anything uses it."""

import gc
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
    memory = ReusedMemory()
    array = memory.empty(SHAPE, np.float32)
    array[...] = 1.0
    used = use(array)
    del array
    others = [memory.empty(SHAPE, np.float32) for _ in range(3)]
    for other in others:
        other[...] = 2.0
    assert np.all(np.asarray(used) == 1.0)


def test_an_unused_array_is_given_out_again_also_for_another_dtype_and_shape():
    memory = ReusedMemory()
    addresses = set()
    for shape, dtype in [([256, 256], "f4"), ([65536], "f4"), ([256, 4, 128], "f2"), ([256, 255], "i4")] * 3:
        array = memory.empty(shape, dtype)
        assert array.shape == tuple(shape) and array.dtype == dtype and address(array) % 64 == 0
        addresses.add(address(array))
        del array
    assert len(addresses) == 1


@pytest.mark.parametrize("shape", [[], [0, 5], [3]])
def test_arrays_that_are_not_kept(shape):
    memory = ReusedMemory()
    array = memory.empty(shape, np.float64)
    assert array.shape == tuple(shape) and (address(array) % 64 == 0 or not array.size)
    assert memory._used_bytes == memory._free_bytes == 0


def test_no_more_is_kept_than_was_in_use_at_once():
    memory = ReusedMemory()
    for _ in range(3):
        held = [memory.empty([2**20], np.uint8) for _ in range(8)]
        del held
    for rows in range(1000):  # of many sizes, one at a time
        memory.empty([2**20 + 2**12 * rows], np.uint8)
        assert sum(size * len(blocks) for size, blocks in memory._free.items()) == memory._free_bytes
        assert memory._free_bytes + memory._used_bytes <= 8 * 2**20
    memory.empty([2**16], np.uint8)
    for _ in range(600):
        memory.empty([2**16], np.uint8)
    assert memory._free_bytes + memory._used_bytes == 2**16


def test_tensorflow_may_write_into_it():
    """It computes in place where a tensor is the only reader, and variables take the memory over."""
    memory, addresses, variables = ReusedMemory(), set(), []
    in_place = tf.function(lambda tensor: tf.reduce_sum(tf.exp(tensor) * 0.0 - 1.0))
    for step in range(20):
        array = memory.empty(SHAPE, np.float32)
        array[...] = step
        addresses.add(address(array))
        tensor = through_dlpack(array)
        del array
        if step % 5 == 0:
            variables.append(tf.Variable(tensor))
            variables[-1].assign_add(tensor)
        assert in_place(tensor) == -BYTES / 4
        del tensor
    assert len(addresses) <= 2 + len(variables)
    assert [float(tf.reduce_max(variable)) for variable in variables] == [0.0, 10.0, 20.0, 30.0]


def test_threads_share_it():
    memory, wrong = ReusedMemory(), []

    def fill(number):
        for _ in range(300):
            array = memory.empty(SHAPE, np.int32)
            array[...] = number
            cycle = [array]
            cycle.append(cycle)  # freed by the collector, in whichever thread it runs
            if not np.all(array == number):
                wrong.append(number)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
