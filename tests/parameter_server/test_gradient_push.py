"""Encodes gradients for a push. A worker's variables are plain variables here."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import compression
from tfdist.compression import Policy
from tfdist.keras_internals.optimizers import LossScale
from tfdist.parameter_server.gradient_push import GradientEncoder, Push

pytestmark = pytest.mark.usefixtures("cpus")

SHAPE = (40, 30)


def prepared(method):
    encoder = GradientEncoder(
        Policy({"large": method}, dense_below=0), lambda value: tf.Variable(value, trainable=False)
    )
    encoder.prepare(["large", "other"], [tf.TensorShape(SHAPE), tf.TensorShape([3])])
    return encoder


@pytest.mark.parametrize("method", ["int8", "int4", "fp8", "sign", "topk:0.1", "randomk:0.1", "powersgd:2"])
def test_decoded_gradients_and_the_residual_add_up(method):
    encoder, random = prepared(method), np.random.default_rng(0)
    given, delivered = np.zeros(SHAPE), np.zeros(SHAPE)
    for _ in range(3):
        gradient = random.normal(size=SHAPE).astype("float32")
        sent, size = encoder.encode(tf.constant(gradient), "large")
        given, delivered = given + gradient, delivered + sent.decode(sent.tensors).numpy()
        assert size == compression.get(method).payload_bytes(SHAPE) < gradient.nbytes
        assert size == sum(tensor.numpy().nbytes for tensor in sent.tensors)
    residual = encoder._state["large"]["residual"].numpy()
    assert np.abs(residual).max() > 1e-4
    np.testing.assert_allclose(delivered + residual, given, atol=2e-5)


def test_other_gradients_are_sent_unchanged():
    gradient = tf.constant([1.0, 2.0, 3.0])
    sent, size = prepared("int8").encode(gradient, "other")
    assert size == 12 and sent.decode(sent.tensors) is gradient


def test_each_row_is_sent_once():
    rows = np.arange(12, dtype="float32").reshape(4, 3)
    slices = tf.IndexedSlices(tf.constant(rows), tf.constant([5, 2, 5, 5], tf.int64), tf.constant([9, 3]))
    sent, size = prepared("int8").encode(slices, "other")
    assert int(size) == 2 * (12 + 8)
    decoded = sent.decode(sent.tensors)
    np.testing.assert_array_equal(decoded.indices, [5, 2])
    np.testing.assert_array_equal(decoded.values, [rows[[0, 2, 3]].sum(0), rows[1]])


class ClippingOptimizer:
    """Subtracts gradients that it has clipped by value; replaces an `OptimizerUpdate`."""

    paths, counter = ("other",), None

    def __init__(self, loss_scale):
        self.loss_scale, self.variable, self.updates = loss_scale, tf.Variable(tf.zeros([3])), tf.Variable(0)

    def clip(self, gradients):
        return [tf.clip_by_value(gradient, -1.0, 1.0) for gradient in gradients]

    def apply(self, sent):
        self.variable.assign_sub(sent[0].decode(sent[0].tensors))

    def constrain(self):
        pass

    def count(self, updated):
        self.updates.assign_add(tf.cast(updated, tf.int32))


@pytest.mark.parametrize(("largest", "updates", "scale"), [(16.0, 1, 8.0), (np.inf, 0, 4.0), (np.nan, 0, 4.0)])
def test_a_push_with_a_loss_scale_is_checked_before_it_is_clipped(largest, updates, scale):
    of_model = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    of_model.build([])
    optimizer = ClippingOptimizer(LossScale(of_model))
    push = Push(of_model, prepared("int8"), micro_steps=1)
    end_phase = tf.function(lambda gradient: push.end_phase(0, [(optimizer, [gradient])], []), autograph=False)
    end_phase(tf.constant([4.0, -2.0, largest]))
    expected = [-0.5, 0.25, -1.0] if updates else [0.0] * 3  # clipped, if it is applied
    assert optimizer.variable.numpy().tolist() == expected
    assert (int(optimizer.updates.numpy()), float(of_model.dynamic_scale.numpy())) == (updates, scale)


@pytest.mark.parametrize("overflows", [False, True])
def test_a_push_that_is_skipped_leaves_residuals(overflows):
    """What was sent is not applied, so nothing is left of it."""
    of_model = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    of_model.build([])
    encoder, optimizer = prepared("topk:0.01"), ClippingOptimizer(LossScale(of_model))
    optimizer.paths, optimizer.variable = ("large",), tf.Variable(tf.zeros(SHAPE))
    push = Push(of_model, encoder, micro_steps=1)
    end_phase = tf.function(lambda gradient: push.end_phase(0, [(optimizer, [gradient])], []), autograph=False)
    end_phase(tf.fill(SHAPE, 2.0))
    before = encoder._state["large"]["residual"].numpy()
    assert before.any()
    gradient = np.full(SHAPE, 2.0, np.float32)
    gradient[0, 0] = np.inf if overflows else 2.0
    end_phase(tf.constant(gradient))
    assert np.array_equal(encoder._state["large"]["residual"], before) == overflows
