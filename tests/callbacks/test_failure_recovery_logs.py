"""FailureRecovery with steps that log vectors: they are saved and restored bit by bit."""

import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from interruptions import Interrupt, Interrupted
from small_training import STEPS, fit, small_model

pytestmark = pytest.mark.usefixtures("cpus")


class LogsVectors(keras.Sequential):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "of classes": tf.reduce_mean(data[1], axis=0) / 3, "not a number": tf.constant(np.nan)}


def model(of):
    return small_model(metrics=[keras.metrics.F1Score()], of=of)


def assert_same(one, other):
    (one, weights), (other, other_weights) = one, other
    assert one.epoch == other.epoch and one.history.keys() == other.history.keys()
    for name, values in one.history.items():
        assert np.array(values).dtype == np.array(other.history[name]).dtype, name
        assert np.array(values).tobytes() == np.array(other.history[name]).tobytes(), name
    assert all(np.array_equal(*pair) for pair in zip(weights, other_weights, strict=True))


@pytest.fixture(scope="module", params=[keras.Sequential, LogsVectors], ids=["metrics", "custom logs"])
def training(request, tmp_path_factory):
    """A class of models, and the result of their training without interruption."""
    return request.param, fit(tmp_path_factory.mktemp("undisturbed"), model=model(request.param))


@pytest.mark.parametrize("steps", [3, STEPS])
def test_an_epoch_resumes(tmp_path, training, steps):
    of, expected = training
    with pytest.raises(Interrupted):
        fit(tmp_path, Interrupt("on_train_batch_end", steps + 1), model=model(of), every_steps=1)
    assert_same(expected, fit(tmp_path, model=model(of), every_steps=1))


def test_a_signal_saves(tmp_path, training):
    of, expected = training
    with pytest.raises(SystemExit, match="75"):
        fit(tmp_path, Interrupt("on_train_batch_end", STEPS, signal.SIGTERM), model=model(of))
    assert_same(expected, fit(tmp_path, model=model(of)))


class LogsText(keras.Sequential):
    def train_step(self, data):
        return {**super().train_step(data), "text": tf.constant("no number")}


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(ValueError, match="'logs/text' cannot be saved. Received: .*no number.* Expected: .*numbers?"):
        fit(tmp_path, model=model(LogsText), every_steps=STEPS - 1)
