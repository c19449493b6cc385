"""The clock of a step in the graph. Each reading of it is a second later than the one before."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from graph_ancestors import ancestors

from tfdist.load_balancing.step_timer import StepTimer
from tfdist.tensorflow_internals import operation_order

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def timer(monkeypatch):
    set_clock(monkeypatch, itertools.count(1))
    return StepTimer("CPU:0")


def set_clock(monkeypatch, seconds):
    """Has the clock show `seconds`, one after another."""
    readings = iter(seconds)
    read = lambda: np.float64(next(readings))  # noqa: E731
    monkeypatch.setattr(operation_order, "seconds_since_1970", lambda: tf.numpy_function(read, [], tf.float64))


def step(timer, data, *, waits=False, sums=False, gradients=True, twice=False, compute=tf.identity):
    """Computes a gradient of `data`, as a replica does; `compute` is called with what is computed."""
    timed = timer.start([data], [], 7)
    with timed.computing():
        if waits:
            data, ended = timed.waiting([compute(data)])
            (data,) = ended([compute(data[0] + 1.0)])
        gradient = compute(2.0 * data)
        if gradients:
            timed.gradients_ready([gradient, None])
        if twice:
            timed.gradients_ready([compute(gradient * 2.0)])
        if sums:
            total = compute(gradient + 1.0)
            with timed.updating([total]):
                gradient = compute(total * 2.0)
    timed.end([gradient])
    return timed.last


@pytest.mark.parametrize(
    ("options", "eagerly", "seconds"),
    [
        ({}, False, 1.0),
        ({"waits": True}, False, 2.0),  # three readings after the first one, of which one ends the wait
        ({"sums": True}, False, 2.0),
        ({"waits": True, "sums": True}, False, 3.0),
        ({"twice": True}, False, 1.0),
        ({"sums": True}, True, 2.0),
        ({"waits": True}, True, 1.0),  # eager replicas wait in merge calls, which are not seen
    ],
)
def test_a_step_is_timed_without_its_waits_and_reported_in_the_next_one(timer, options, eagerly, seconds):
    def run(data):
        return step(timer, data, **options)

    run = run if eagerly else tf.function(run, autograph=False)
    assert run(tf.constant(1.0)).numpy().tolist() == [0.0, 0.0, 0.0]
    readings = 2.0 + 2.0 * options.get("waits", False) * (not eagerly) + 2.0 * options.get("sums", False)
    assert run(tf.constant(2.0)).numpy().tolist() == [seconds, 7.0, readings]


def test_the_length_of_a_wait_is_left_out(timer, monkeypatch):
    """The first reading is 2 s, each further one twice as late; the second begins a wait, the third ends it."""
    set_clock(monkeypatch, (2**number for number in itertools.count(1)))
    run = tf.function(lambda data: step(timer, data, waits=True), autograph=False)
    run(tf.constant(1.0))
    assert run(tf.constant(2.0)).numpy().tolist() == [(16 - 2) - (8 - 4), 7.0, 32 - 2]


def test_a_step_without_an_update_stores_nothing(timer):
    run = tf.function(lambda data: step(timer, data, gradients=False), autograph=False)
    run(tf.constant(1.0))
    assert run(tf.constant(1.0)).numpy().tolist() == [0.0, 0.0, 1.0]


def test_what_is_computed_in_a_branch_is_not_timed(timer):
    @tf.function(autograph=False)
    def run(data):
        timed = timer.start([data], [], 7)

        def branch():
            tensors, ended = timed.waiting([data])
            timed.gradients_ready(ended(tensors))
            with timed.updating([data]):
                return tf.identity(data)

        tf.cond(data > 0, branch, lambda: data)
        timed.end([data])
        return timed.last

    run(tf.constant(1.0))
    assert run(tf.constant(1.0)).numpy().tolist() == [0.0, 0.0, 1.0]


def test_what_is_timed_waits_for_the_clock_in_the_graph(monkeypatch):
    """Without the edges TensorFlow may compute first, and does so with one thread after about 100 steps."""
    computed = []

    def compute(tensor):
        result = tf.identity(tensor)
        computed.append(result.op)
        return result

    timer = StepTimer("CPU:0")
    function = tf.function(lambda data: step(timer, data, waits=True, sums=True, compute=compute), autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec([])).graph
    clocks = [op for op in graph.get_operations() if op.type == "Timestamp"]
    start, wait, waited, gradients, sums, end = clocks
    before, reduced, gradient, summed, updated = computed

    def follow(*operations):
        return all(first in ancestors(then) for first, then in itertools.pairwise(operations))

    assert follow(start, before, wait, reduced, waited, gradient, gradients, sums, updated, end)
    assert follow(gradient, summed, sums)
    assert gradients not in ancestors(summed), "the exchange of the first gradients does not wait for the last ones"
