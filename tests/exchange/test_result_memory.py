"""Memory of results that is used again: never while an array, a view, a tensor or a variable still reads it."""

import gc
import threading

import numpy as np
import tensorflow as tf

from tfdist.exchange.result_memory import ResultMemory

VALUES = 300_000
BYTES = 4 * VALUES


def filled(memory, value):
    array = memory.empty((VALUES,), np.float32)
    array[...] = value
    return array


def as_tensor(array):
    return tf.bitcast(
        tf.reshape(tf.experimental.dlpack.from_dlpack(array.view(np.uint8).__dlpack__()), [-1, 4]), tf.float32
    )


def test_what_still_reads_a_result_keeps_it():
    """Later results never overwrite: views, views of views, buffers, capsules, tensors, slices and variables."""
    memory, kept = ResultMemory(), []
    variable = tf.Variable(tf.zeros([VALUES]))
    added = tf.function(lambda tensor: (variable.assign_add(tensor), tensor * 2.0, tf.reshape(tensor, [3, -1])))
    for step in range(40):
        array = filled(memory, step)
        keep = [
            lambda array: array,
            lambda array: array[5:],
            lambda array: array.reshape(3, -1).T[7:, 1],
            lambda array: memoryview(array.view(np.uint8)),
            lambda array: as_tensor(array),
            lambda array: as_tensor(array)[10:20],
            lambda array: tf.Variable(as_tensor(array)),
            lambda array: added(as_tensor(array))[2],
            lambda array: as_tensor(array).numpy(),
            lambda array: None,
        ][step % 10]
        kept.append((step, keep(array)))
        del array
    for step, one in kept:
        if one is not None:
            values = np.frombuffer(one, np.float32) if isinstance(one, memoryview) else np.asarray(one)
            assert values.size and (values == step).all(), step
    assert (variable.numpy() == sum(range(7, 40, 10))).all()


def test_memory_is_used_again_and_tensorflow_may_write_into_it():
    """TensorFlow computes in place where a tensor is its only reader: the next result has its own values."""
    memory, addresses = ResultMemory(), set()
    in_place = tf.function(lambda tensor: tf.reduce_sum(tf.exp(tensor) * 0.0 - 1.0))
    for step in range(20):
        array = filled(memory, step)
        addresses.add(array.ctypes.data)
        tensor = as_tensor(array)
        del array
        assert in_place(tensor) == -VALUES
        del tensor
    assert len(addresses) <= 2


def test_no_more_is_kept_than_was_in_use_at_once():
    memory = ResultMemory()
    for _ in range(3):
        held = [memory.empty((2**20 + 64 * number,), np.uint8) for number in range(8)]
        del held
    memory.empty((2**20,), np.uint8)
    assert memory._free_bytes + memory._used_bytes <= 8 * (2**20 + 64 * 8)
    for size in range(1000):  # sizes that never repeat
        memory.empty((2**20 + 64 * size,), np.uint8)
    assert memory._free_bytes + memory._used_bytes <= 2**20 + 64 * 1000
    assert sum(len(blocks) * size for size, blocks in memory._free.items()) == memory._free_bytes


def test_leases_of_several_threads_do_not_share_memory():
    memory, wrong = ResultMemory(), []

    def body(number):
        for _ in range(100):
            arrays = [filled(memory, number), filled(memory, number)]
            cycle = [arrays]
            cycle.append(cycle)  # freed by the collector, in whichever thread it runs
            if any((array != number).any() for array in arrays):
                wrong.append(number)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
