"""ExchangeTimer: what counts as encoding, exchange and decoding, also in conditions and loops."""

import itertools
import time

import numpy as np
import pytest
import tensorflow as tf
from graph_ancestors import ancestors
from tensorflow.python.framework import config

from tfdist.collectives.exchange_timer import (
    ExchangeDurations,
    ExchangeTimer,
    TimedGroup,
    begin_bucket,
    end_bucket,
)
from tfdist.compression import Group
from tfdist.tensorflow_internals.operation_order import after_clocks, read_clock


def after(seconds, tensor):
    """`tensor`, that long after it is there."""

    def wait(value):
        time.sleep(seconds)
        return value

    slow = tf.numpy_function(wait, [tensor], tensor.dtype, stateful=False)
    slow.set_shape(tensor.shape)
    return slow


class SlowGroup(Group):
    """Every collective takes 0.1 seconds."""

    size = 2

    def sum(self, tensor):
        return after(0.1, tensor)

    def gather(self, tensor):
        return after(0.1, tf.concat([tensor, tensor], axis=0))

    def exchange(self, slices):
        return after(0.1, slices), tf.constant(0)


def reduced(group, gradient):
    """0.05 seconds to encode and 0.05 more between the collectives, 0.2 in collectives, 0.3 to decode."""
    first = group.exchange(after(0.05, gradient))[0]
    return after(0.3, group.sum(after(0.05, first)))


def reduced_in_a_condition(group, gradient):
    return tf.cond(gradient[0, 0] >= 0, lambda: reduced(group, gradient), lambda: -gradient)


@pytest.mark.parametrize("reduce", [reduced, reduced_in_a_condition])
def test_time_is_counted_as_what_it_is_spent_on(cpus, reduce):
    timer = ExchangeTimer(cpus[0])

    @tf.function
    def steps(count):
        def step(index, gradient):
            group, (gradient,) = begin_bucket(TimedGroup(SlowGroup(), timer, "method"), [gradient])
            (summed,) = end_bucket(group, [reduce(group, after(0.02, gradient))])
            return index + 1, summed

        return tf.while_loop(lambda index, _: index < count, step, (0, tf.ones([2, 3], tf.int32)))[1]

    np.testing.assert_array_equal(steps(2), np.ones([2, 3]))
    spent = timer.by_label()["method"]
    # A sleep lasts at least its argument, so time that is counted under another kind would be missing. A
    # reading of the clock may come late, by less than the 0.05 seconds between these numbers and what was slept.
    assert spent.encode_seconds >= 2 * 0.05
    assert spent.exchange_seconds >= 2 * 0.15
    assert spent.decode_seconds >= 2 * 0.25
    steps(1)
    assert (timer.by_label()["method"] - spent).decode_seconds >= 0.25


def test_time_before_the_gradients_are_there_does_not_count(cpus):
    timer = ExchangeTimer(cpus[0])

    @tf.function
    def step(value):
        gradient = after(0.5, after(0.5, value))
        group, (gradient,) = begin_bucket(TimedGroup(SlowGroup(), timer, "method"), [gradient])
        end_bucket(group, [group.sum(gradient)])

    begin = time.perf_counter()
    step(tf.ones([2]))
    elapsed = time.perf_counter() - begin
    spent = timer.by_label()["method"]
    assert 0.05 <= spent.encode_seconds + spent.exchange_seconds + spent.decode_seconds <= elapsed - 1.0


def test_what_overlaps_counts_once(cpus, monkeypatch):
    # The gradients, the first collective's input and result, the second one's, the sums.
    readings = iter(np.int64([1000, 1010, 1110, 1020, 1130, 1140]))
    clock = lambda: tf.constant(next(readings) / 1e9, tf.float64)  # noqa: E731
    monkeypatch.setattr("tfdist.tensorflow_internals.operation_order.seconds_since_1970", clock)
    timer, ones = ExchangeTimer(cpus[0]), tf.ones([2])
    group, _ = begin_bucket(TimedGroup(SlowGroup(), timer, "method"), [ones])
    end_bucket(group, [group.sum(ones), group.gather(ones)])
    assert timer.by_label() == {"method": ExchangeDurations(10 / 1e9, 120 / 1e9, 10 / 1e9)}
    readings = iter(np.int64([5000, 5100, 5300, 5600]))  # eagerly the next step uses the same counter
    group, _ = begin_bucket(TimedGroup(SlowGroup(), timer, "method"), [ones])
    end_bucket(group, [group.sum(ones)])
    assert timer.by_label() == {"method": ExchangeDurations(110 / 1e9, 320 / 1e9, 310 / 1e9)}


def test_gradients_that_are_constants_are_timed_in_every_step(cpus):
    timer = ExchangeTimer(cpus[0])

    @tf.function
    def step(value):
        group, _ = begin_bucket(TimedGroup(SlowGroup(), timer, "method"), [tf.zeros([2])])
        end_bucket(group, [group.sum(value)])

    step(tf.ones([2]))
    time.sleep(0.5)
    before, begin = timer.by_label()["method"], time.perf_counter()
    step(tf.ones([2]))
    elapsed = time.perf_counter() - begin
    spent = timer.by_label()["method"] - before
    assert spent.encode_seconds + spent.exchange_seconds + spent.decode_seconds <= elapsed


def test_what_is_timed_waits_for_the_clock_in_the_graph(cpus):
    """Without the edges TensorFlow may compute first, and does so with one thread after about 100 steps."""
    timer, passed = ExchangeTimer(cpus[0]), []

    class NotingGroup(SlowGroup):
        def sum(self, tensor):
            passed.append(tf.identity(tensor))
            return passed[-1]

    @tf.function(autograph=False)
    def step(gradient):
        rows = tf.IndexedSlices(gradient + 1.0, tf.constant([0, 1]), tf.constant([2]))
        group, (encoded,) = begin_bucket(TimedGroup(NotingGroup(), timer, "method"), [gradient])
        passed.append(encoded)
        (decoded,) = end_bucket(group, [tf.identity(group.sum(encoded))])
        clock = read_clock([decoded], cpus[0])
        passed.extend([decoded, after_clocks([clock], [rows])[0].values])

    graph = step.get_concrete_function(tf.TensorSpec([2])).graph
    clocks = [op for op in graph.get_operations() if op.type == "Timestamp"]
    encoded, exchanged, decoded, of_rows = (tensor.op for tensor in passed)
    start, encode, exchange, decode, own = clocks
    chain = [start, encoded, encode, exchanged, exchange, decode, decoded, own, of_rows]
    assert all(first in ancestors(then) for first, then in itertools.pairwise(chain))


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def maybe_deterministic(request):
    """Determinism of operations, with which TensorFlow refuses to run its own clock."""
    if request.param:
        tf.config.experimental.enable_op_determinism()
    yield
    config.disable_op_determinism()


def test_labels_and_buckets(cpus, maybe_deterministic):
    timer = ExchangeTimer(cpus[0])

    @tf.function
    def step(gradient):
        for label in ("one", "other", "other"):
            group, (gradient,) = begin_bucket(TimedGroup(SlowGroup(), timer, label), [gradient])
            (gradient,) = end_bucket(group, [group.sum(gradient)])

    step(tf.ones([2]))
    spent = timer.by_label()
    assert set(spent) == {"one", "other"}
    assert spent["one"].exchange_seconds >= 0.05 and spent["other"].exchange_seconds >= 0.15


def test_an_untimed_group_is_left_alone():
    group = SlowGroup()
    gradients, sums = [tf.zeros([1])], [tf.ones([1])]
    assert begin_bucket(group, gradients) == (group, gradients)
    assert end_bucket(group, sums) == sums
    assert ExchangeDurations(3, 2, 1) - ExchangeDurations(1, 1, 1) + ExchangeDurations(1, 0, 0) == ExchangeDurations(
        3, 1, 0
    )
