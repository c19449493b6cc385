"""The exchange beside the steps: in order, in a function, with a limit, and with errors that reach the step."""

import gc
import threading
import weakref

import pytest
import tensorflow as tf

from tfdist.local_updates.background_exchange import BackgroundExchange

pytestmark = pytest.mark.usefixtures("cpus")


class Reduction:
    """Stands for the sum over two equal workers; calls `meanwhile` in each exchange."""

    def __init__(self, meanwhile=lambda: None):
        self._meanwhile = meanwhile

    def share_of_worker(self, samples):
        return samples / 10.0

    def sum_of_workers(self, tensors, paths):
        def called(value):
            self._meanwhile()
            return value

        return [2.0 * tf.ensure_shape(tf.py_function(called, [one], tf.float32), one.shape) for one in tensors]


def exchange(reduction, timeout_seconds=60.0):
    shape = tf.TensorShape([2])
    calls = []

    def late(number):
        calls.append(number)
        return "worker 1" if calls.count(number) > 1 else ""

    return BackgroundExchange([([shape], ["a"]), ([shape], ["b"])], reduction, "CPU:0", timeout_seconds, late)


def test_sums_arrive_in_functions_and_can_be_given_back():
    exchanged = exchange(Reduction())

    @tf.function
    def step(value):
        for number in range(2):
            exchanged.send(number, tf.constant(5.0), [value * (number + 1)])
        return [exchanged.receive(number)[0] for number in range(2)]

    first, second = step(tf.constant([1.0, 2.0]))
    assert first.numpy().tolist() == [1.0, 2.0]
    assert second.numpy().tolist() == [2.0, 4.0]
    exchanged.give_back(1, [second])
    assert exchanged.receive(1)[0].numpy().tolist() == [2.0, 4.0]
    exchanged.give_back(0, [first])
    exchanged.clear()
    exchanged.give_back(0, [second])
    assert exchanged.receive(0)[0].numpy().tolist() == [2.0, 4.0]


def test_an_exchange_that_takes_too_long_names_the_late_workers():
    has_failed = threading.Event()
    exchanged = exchange(Reduction(lambda: has_failed.wait(60)), timeout_seconds=0.1)
    try:
        exchanged.send(0, tf.constant(5.0), [tf.zeros([2])])
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"longer than 0.1 s. Received: nothing from worker 1"):
            exchanged.receive(0)
    finally:
        has_failed.set()


def test_the_error_of_an_exchange_is_that_of_the_step():
    def fail():
        raise RuntimeError("a lost worker")

    exchanged = exchange(Reduction(fail))
    exchanged.send(0, tf.constant(5.0), [tf.zeros([2])])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"exchange of weights has failed.*a lost worker"):
        exchanged.receive(0)


def test_what_sums_lives_as_long_as_the_exchange():
    """Its exchanges with the other workers end with it."""

    class Sums:
        def share_of_worker(self, samples):
            return samples / 10.0

        def sum_of_workers(self, tensors, paths):
            return [2.0 * one for one in tensors]

    sums = Sums()
    exchanged, reference = exchange(sums), weakref.ref(sums)
    del sums
    gc.collect()
    assert reference() is not None
    exchanged.send(0, tf.constant(5.0), [tf.constant([1.0, 2.0])])
    assert exchanged.receive(0)[0].numpy().tolist() == [1.0, 2.0]
