"""The clock of a step in the graph. Each reading of it is a second later than the one before in the program."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.load_balancing import step_timer
from tfdist.load_balancing.step_timer import StepTimer

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def timer(monkeypatch):
    monkeypatch.setattr(step_timer, "_nanoseconds", lambda _, number: np.int64(int(number) * 10**9))
    return StepTimer("CPU:0")


def step(timer, data, *, waits=False, sums=False, gradients=True, twice=False):
    """Computes a gradient of `data`, as a replica does."""
    timed = timer.start([data], [], 7)
    if waits:
        ended = timed.waiting([data])
        data = data + 1.0
        ended([data])
    gradient = 2.0 * data
    if gradients:
        timed.gradients_ready([gradient, None])
    if twice:
        timed.gradients_ready([gradient * 2.0])
    if sums:
        total = gradient + 1.0
        timed.sums_ready([total])
        gradient = total * 2.0
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
    assert run(tf.constant(1.0)).numpy().tolist() == [0.0, 0.0]
    assert run(tf.constant(2.0)).numpy().tolist() == [seconds, 7.0]


def test_the_length_of_a_wait_is_left_out(timer, monkeypatch):
    """The first reading is 2 s, each further one twice as late; the second begins a wait, the third ends it."""
    monkeypatch.setattr(step_timer, "_nanoseconds", lambda _, number: np.int64(2 ** int(number) * 10**9))
    run = tf.function(lambda data: step(timer, data, waits=True), autograph=False)
    run(tf.constant(1.0))
    assert run(tf.constant(2.0)).numpy().tolist() == [(16 - 2) - (8 - 4), 7.0]


def test_a_step_without_an_update_stores_nothing(timer):
    run = tf.function(lambda data: step(timer, data, gradients=False), autograph=False)
    run(tf.constant(1.0))
    assert run(tf.constant(1.0)).numpy().tolist() == [0.0, 0.0]


def test_what_is_computed_in_a_branch_is_not_timed(timer):
    @tf.function(autograph=False)
    def run(data):
        timed = timer.start([data], [], 7)

        def branch():
            timed.waiting([data])([data])
            timed.gradients_ready([data])
            timed.sums_ready([data])
            return data

        tf.cond(data > 0, branch, lambda: data)
        timed.end([data])
        return timed.last

    run(tf.constant(1.0))
    assert run(tf.constant(1.0)).numpy().tolist() == [0.0, 0.0]
