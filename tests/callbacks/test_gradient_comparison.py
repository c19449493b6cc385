"""Gradients of the same rows are computed by all replicas: who has others than the majority is named."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flipped_gradients import FlippedGradients

from tfdist.callbacks import WeightComparison, gradient_comparison
from tfdist.callbacks.gradient_comparison import DifferentGradientsError
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
ROWS = np.random.default_rng(0).normal(size=(36, 3)).astype("float32")
TARGETS = ROWS.sum(axis=1, keepdims=True)


def build(*layers, shape=(3,), batch_size=None, loss="mse"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape, batch_size), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def fit(devices, layers, *callbacks, **options):
    with MirroredStrategy(devices).scope():
        model = build(*layers())
    model.fit(ROWS, TARGETS, batch_size=6, verbose=0, callbacks=[*callbacks], **options)
    return model


class Flips:
    """Says that the second device is wrong in a computation, or in all."""

    def __init__(self, only=None):
        self._only, self._calls = only, 0

    def __call__(self, device):
        if not device.endswith("CPU:1"):
            return False
        self._calls += 1
        return self._only in (None, self._calls)


@pytest.mark.parametrize(
    ("devices", "only", "computations", "message"),
    [
        (3, None, 2, "other gradients than the majority. .*; of 6 computations of 3 replicas after step 4"),
        (2, 2, 1, "other gradients than the majority. .*; of 4 computations of 2 replicas after step 4"),
        pytest.param(2, None, 2, "nobody knows which are right. .*of 4 computations", marks=pytest.mark.long),
    ],
)
def test_a_device_with_wrong_gradients_is_named(cpus, devices, only, computations, message):
    flips = Flips(only)
    with pytest.raises(DifferentGradientsError, match=message) as raised:
        fit(
            cpus[:devices],
            lambda: [keras.layers.Dense(4), FlippedGradients(flips)],
            WeightComparison(4, check_gradients=0.5),
        )
    assert raised.value.ranks == (0,)
    assert str(raised.value).count("worker 0, device 1: loss ") == computations


@pytest.mark.parametrize("only", [None, 2])
def test_another_processor_may_round_otherwise_but_alike_each_time(cpus, monkeypatch, caplog, only):
    monkeypatch.setattr(gradient_comparison, "_processor", lambda device: int(device.endswith("CPU:1")))
    layers = [keras.layers.Dense(4), FlippedGradients(Flips(only))]
    arguments = cpus[:3], lambda: layers, WeightComparison(2, check_gradients=0.5)
    if only is None:
        fit(*arguments)
        assert caplog.text.count("finds different gradients on different processors") == 1
        assert "worker 0, device 1: loss" in caplog.text
    else:
        with pytest.raises(DifferentGradientsError, match="other gradients than the majority"):
            fit(*arguments)


def test_a_processor_has_one_number():
    assert gradient_comparison._processor("/device:CPU:0") == gradient_comparison._processor("/device:CPU:1") > 0


def test_a_comparison_changes_nothing(cpus):
    def layers():
        return [
            keras.layers.Dense(4, "tanh", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
        ]

    expected = fit(cpus[:2], layers)
    model = fit(cpus[:2], layers, WeightComparison(1, check_gradients=0.1))
    for variable, other in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy(), variable.path)


def test_what_differs_by_rounding_is_right():
    right, rounded, wrong = (np.array([1.0, 2.0, *[more] * 4]) for more in (0.5, 0.50001, 0.51))
    assert gradient_comparison._is_close(right, rounded, 3e-4)
    assert not gradient_comparison._is_close(right, wrong, 3e-4)
    assert not gradient_comparison._is_close(right, right * np.inf, 3e-4)
    assert gradient_comparison._is_close(right * np.nan, right * np.nan, 3e-4), "of a training that diverges"


def test_projections_show_a_difference_that_has_the_same_norm():
    values = np.random.default_rng(0).normal(size=[2, 50]).astype("float32")
    one, other = (gradient_comparison._sketch([np.float32(1), array]) for array in (values, values[::-1]))
    np.testing.assert_allclose(one[:2], other[:2])
    assert not gradient_comparison._is_close(one, other, 3e-4)


def test_rows_of_any_kind_are_sent():
    tensors = [
        tf.constant([["a", "bcd"]]),
        tf.cast([1.5, 2.5], tf.bfloat16),
        tf.zeros([0, 3], tf.int64),
        *tf.nest.flatten(tf.ragged.constant([[1], [2, 3]]), expand_composites=True),
    ]
    for sent, received in zip(
        tensors, gradient_comparison._decoded(gradient_comparison._encoded(tensors), tensors), strict=True
    ):
        assert sent.dtype == received.dtype
        np.testing.assert_array_equal(sent, received)


@pytest.mark.parametrize("fraction", [0, 1.5, float("nan"), "half", True])
def test_a_fraction_is_a_number(fraction):
    with pytest.raises(ValueError, match="Invalid `check_gradients`"):
        WeightComparison(check_gradients=fraction)


class OwnStep(keras.Sequential):
    """Knows its loss alone."""

    def train_step(self, data):
        """Trains on nothing."""
        return {}


def own_step():
    model = OwnStep([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd")
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [(own_step, "neither a compiled loss nor"), (lambda: build(batch_size=6), "a static batch size")],
)
def test_models_whose_rows_cannot_be_computed_again_are_refused(cpus, make, reason):
    with MirroredStrategy(cpus[:2]).scope():
        model = make()
    with pytest.raises(ValueError, match=f"`check_gradients` .* Received: .*{reason}"):
        model.fit(ROWS, TARGETS, batch_size=6, verbose=0, callbacks=[WeightComparison(check_gradients=1)])


def test_custom_loops_are_refused(cpus):
    comparison = WeightComparison(check_gradients=1)
    with MirroredStrategy(cpus[:2]).scope():
        comparison.set_model(build())
    with pytest.raises(ValueError, match="Received: a loop of the program"):
        comparison.on_train_begin()
