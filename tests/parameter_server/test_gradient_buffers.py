"""Parts of a round are written to gradient buffers: a part that is written twice counts once, as written last."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import Policy
from tfdist.keras_internals.optimizers import LossScale
from tfdist.parameter_server.gradient_buffers import GradientBuffers
from tfdist.parameter_server.gradient_push import GradientEncoder
from tfdist.parameter_server.worker_step import StepResult

pytestmark = pytest.mark.usefixtures("cpus")

WIDTH, ROWS, BUFFERS = 3, 7, 3


class Optimizer:
    """Subtracts gradients; replaces an `OptimizerUpdate`."""

    counter = None
    paths = ("dense", "table")

    def __init__(self, loss_scale=None):
        self.loss_scale, self.updates = loss_scale, tf.Variable(0)
        self.servers_variables = [tf.Variable(tf.zeros([WIDTH])), tf.Variable(tf.zeros([ROWS, WIDTH]))]

    def clip(self, gradients):
        return gradients

    def apply(self, gradients):
        dense, rows = gradients
        self.servers_variables[0].assign_sub(dense)
        self.servers_variables[1].scatter_sub(rows)

    def constrain(self):
        pass

    def count(self, updated):
        self.updates.assign_add(tf.cast(updated, tf.int32))


class Round:
    """A round whose parts have a dense gradient, a gradient of rows, and changes of a mean and a count."""

    def __init__(self, loss_scale=None):
        self.optimizer, self.of_model = Optimizer(loss_scale), keras.optimizers.SGD()
        self.changed = [tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)]
        self.buffers = GradientBuffers(BUFFERS)
        self.encoder = GradientEncoder(Policy(None), tf.Variable)
        self.write = tf.function(self._write, autograph=False, reduce_retracing=True)

    def _write(self, buffer, dense, rows, ids, mean, count):
        gradients = [dense, tf.IndexedSlices(rows, ids, tf.constant([ROWS, WIDTH]))]
        zero = tf.constant(0, tf.int64)
        changes = list(zip(self.changed, (mean, count), strict=True))
        self.buffers.write(
            StepResult([gradients], [self.optimizer], changes, [], {}, zero, zero, zero, 0), buffer, self.encoder
        )

    def part(self, buffer, number, ids):
        """Writes the results of part `number` to a buffer."""
        rows = np.full([len(ids), WIDTH], number, "float32")
        dense, ids = tf.fill([WIDTH], float(number)), tf.constant(ids, tf.int64)
        self.write(
            tf.constant(buffer), dense, tf.constant(rows), ids, tf.constant(float(number)), tf.constant(5, tf.int64)
        )

    def update(self, buffers, weights):
        update = tf.function(lambda s, w: self.buffers.update(s, w, self.of_model), autograph=False)
        update(tf.constant(buffers), tf.constant(weights, tf.float64))
        dense, table = (-variable.numpy() for variable in self.optimizer.servers_variables)
        return dense.tolist(), table[:, 0].tolist(), [variable.numpy() for variable in self.changed]


@pytest.mark.parametrize("again", [[], [(0, 4)], [(0, 1000), (2, 8), (0, 4)]], ids=["once", "the same", "another"])
def test_a_part_that_is_written_again_counts_once(again):
    of = Round()
    of.part(0, 4, [1, 6])
    of.part(2, 8, [6, 2])
    for buffer, number in again:
        of.part(buffer, number, {0: [1, 6], 2: [6, 2]}[buffer])
    dense, table, (mean, count) = of.update([0, 2], [0.75, 0.25])
    assert dense == [0.75 * 4 + 0.25 * 8] * WIDTH
    assert table == [0, 3, 2, 0, 0, 0, 5]
    assert (mean, count) == (5.0, 5)
    assert int(of.of_model.iterations.numpy()) == 1


def test_an_unused_buffer_changes_nothing():
    of = Round()
    for buffer, number in ((0, 4), (1, 1000), (2, 8)):
        of.part(buffer, number, [buffer])
    dense, table, (mean, _) = of.update([2, 0], [0.5, 0.5])
    assert dense == [6.0] * WIDTH and table == [2, 0, 4, 0, 0, 0, 0] and mean == 6.0
    of.part(1, 8, [3])  # fewer rows than before
    dense, table, _ = of.update([1], [1.0])
    assert dense == [14.0] * WIDTH and table == [2, 0, 4, 8, 0, 0, 0]


@pytest.mark.parametrize(("gradient", "updates", "scale"), [(16.0, 1, 8.0), (np.inf, 0, 4.0), (np.nan, 0, 4.0)])
def test_a_round_with_a_loss_scale_is_skipped_unless_all_parts_are_finite(gradient, updates, scale):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    optimizer.build([])
    of = Round(LossScale(optimizer))
    of.part(0, 16, [1])
    of.part(1, gradient, [2])
    dense, table, (_, count) = of.update([0, 1], [0.5, 0.5])
    assert dense == [updates * 16 / 8] * WIDTH and table == [0, updates, updates, 0, 0, 0, 0]
    assert (int(of.optimizer.updates.numpy()), float(optimizer.dynamic_scale.numpy())) == (updates, scale)
    assert count == 5  # other changes are made


def test_a_round_that_is_skipped_leaves_the_residuals_of_finite_parts():
    """What a worker has sent is not applied if the part of another one is not finite, so nothing is left of it."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    optimizer.build([])
    own, other, without_skipped = Round(LossScale(optimizer)), Round(), Round()
    own.optimizer.counter = own.optimizer.updates
    other.buffers, other.optimizer = own.buffers, own.optimizer
    for of in (own, without_skipped):
        of.encoder = GradientEncoder(Policy({"dense": "fp16"}, dense_below=0), tf.Variable)
        of.encoder.prepare(["dense"], [tf.TensorShape([WIDTH])], may_skip_rounds=of is own)
    for number, overflows in ((0.1, False), (0.7, True), (0.9, True), (0.3, False), (1.1, False)):
        scale = float(optimizer.dynamic_scale)
        for _ in range(2 if number == 0.3 else 1):  # also the part of a worker that was lost
            own.part(0, number * scale, [1])
            if not overflows:
                without_skipped.part(0, number, [1])
        other.part(1, np.inf if overflows else 0.0, [1])
        own.update([0, 1], [0.5, 0.5])
    residuals = [of.encoder.read_state("dense")["residual"].numpy() for of in (own, without_skipped)]
    assert residuals[0].any()
    np.testing.assert_array_equal(*residuals)
