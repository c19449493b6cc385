"""Normalizers of masks and weights are computed without the model's layers and variables."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import strategy_hooks
from tfdist.keras_internals import losses as installed
from tfdist.keras_internals.strategy_patches import patch_keras
from tfdist.losses.loss_scaling import LossStep
from tfdist.parameter_server.loss_normalizers import AllRecorded, LossNormalizers, MicroStep, Recording
from tfdist.strategies import ParameterServerStrategy
from tfdist.strategies.parameter_server_strategy import HOOKS
from tfdist.strategy_hooks import StrategyHooks

pytestmark = pytest.mark.usefixtures("cpus")

TOKENS = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6], [0, 0, 0], [7, 0, 0]], "int32")
LABELS, WEIGHTS = np.ones([5, 3], "int64"), np.linspace(0.5, 2.0, 15).reshape(5, 3).astype("float32")


class OneProcess:
    """Replaces a strategy."""

    scope = staticmethod(contextlib.nullcontext)
    run = staticmethod(lambda function: function())


@pytest.fixture
def model():
    patch_keras(ParameterServerStrategy, HOOKS)
    tokens = keras.Input((3,), dtype="int32")
    hidden = keras.layers.LSTM(4, return_sequences=True)(keras.layers.Embedding(9, 4, mask_zero=True)(tokens))
    # This mask is computed from a layer's outputs; a sequence that is masked at all steps has no valid entry.
    shown = keras.layers.Masking()(keras.layers.Dense(4, use_bias=False, kernel_initializer="ones")(hidden * 0 + 1))
    outputs = {name: keras.layers.Dense(3, name=name)(of) for name, of in (("a", hidden), ("b", hidden), ("c", shown))}
    built = keras.Model(tokens, outputs)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy
    of_weights = cross_entropy(from_logits=True, reduction="mean_with_sample_weight")
    built.compile("sgd", {"a": cross_entropy(from_logits=True), "b": of_weights, "c": cross_entropy(from_logits=True)})
    built.test_on_batch(*batch())
    return built


def batch(rows=slice(None)):
    labels, weights = ({name: tf.constant(of[rows]) for name in "abc"} for of in (LABELS, WEIGHTS))
    return tf.constant(TOKENS[rows]), labels, weights


def test_normalizers_of_masks_and_weights(model):
    valid = TOKENS > 0
    for rows in (slice(None), slice(0, 2)):
        found = LossNormalizers(model, OneProcess).of([batch(rows)], 2)
        np.testing.assert_allclose(found, [valid[rows].sum(), (valid * WEIGHTS)[rows].sum()], rtol=1e-6)
    in_two = LossNormalizers(model, OneProcess).of([batch(slice(0, 2)), batch(slice(2, 5))], 2)
    np.testing.assert_allclose(in_two, [valid.sum(), (valid * WEIGHTS).sum()], rtol=1e-6)


def test_no_layer_runs_and_no_variable_is_read(model):
    function = LossNormalizers(model, OneProcess).function(batch(), 2)
    assert function.reads == 0
    assert set(function.operations) <= set("Cast Const Identity Mul NotEqual Pack StopGradient Sum".split())


def test_a_mask_computed_by_a_layer_reads_that_layer(model):
    function = LossNormalizers(model, OneProcess).function(batch(), 3)
    assert function.reads and "ReadVariableOp" in function.operations
    assert LossNormalizers(model, OneProcess).of([batch()], 3)[2] == TOKENS.size


def test_a_step_with_fewer_normalizers_is_an_error(model):
    with pytest.raises(RuntimeError, match=r"Received: 3 masked or weighted means .* Expected: 4, as for a part\."):
        LossNormalizers(model, OneProcess).of([batch()], 4)


@tf.function
def fractions(divisor, totals):
    """By mean: the third is taken in a condition, the fourth has no total."""
    step, found = MicroStep(tf.constant(3.0, tf.float64), tf.unstack(totals)), []

    def in_condition():
        with step.share_of(divisor):
            return tf.cast(step.fraction, tf.float64)

    for _ in range(2):
        with step.share_of(divisor):
            found.append(step.fraction)
    found.append(tf.cond(divisor > 0, in_condition, lambda: tf.constant(-1.0, tf.float64)))
    with step.share_of(divisor):
        found.append(tf.cast(step.fraction, tf.float64))
    assert (step.num_normalizers, step.fraction) == (3, 1)
    return found


def test_fractions_of_normalizers():
    found = fractions(tf.constant(4.0), tf.constant([6.0, 0.0], tf.float64))
    assert [float(value) for value in found] == [2.0, 0.0, 1.0, 1.0]


def test_a_recording_ends_with_its_last_normalizer():
    step = Recording(2)
    with step.share_of(tf.constant(1.0)):
        assert step.fraction == 1
    with pytest.raises(AllRecorded), step.share_of(tf.constant(2.0)):
        pytest.fail("the step continues")
    assert [float(value) for value in step.normalizers] == [1.0, 2.0]


class ReplicaStep(LossStep):
    fraction, samples_are_static, parts_of_replica = 0.25, False, 6


def test_steps_of_two_kinds_of_strategies_are_distinguished(monkeypatch):
    """Whichever is registered first, and patched once."""
    losses, outputs = installed.losses, installed.compile_utils
    running = {"first": None, "second": None}
    for name in running:
        hooks = StrategyHooks(current_step=lambda name=name: running[name])
        monkeypatch.setitem(strategy_hooks._hooks, type(name, (), {}), hooks)
        installed.patch_losses()
    for name in running:
        running[name] = ReplicaStep()
        assert float(losses.scale_loss_for_distribution(tf.constant(8.0))) == 2.0
        assert float(losses.unscale_loss_for_distribution(tf.constant(8.0))) == 32.0
        assert float(outputs.loss_module.unscale_loss_for_distribution(tf.constant(8.0))) == 48.0
        running[name] = None
    assert float(losses.scale_loss_for_distribution(tf.constant(8.0))) == 8.0
