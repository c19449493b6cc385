"""A checkpoint of another model, optimizer or metric is rejected, by its first difference, before anything changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import trainings
from trainings import SPEC, made, restore, saved, steps

from tfdist.compression import Policy
from tfdist.recovery.random_generators import python_and_numpy_state
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


def model(units=8, optimizer=None, metrics=("accuracy",), kind=keras.layers.Dense, dtype="float32", more=False):
    layers = [kind(units, dtype=dtype, name="hidden"), *([keras.layers.Dense(3)] if more else [])]
    made = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer or keras.optimizers.Adam(), loss=loss, metrics=list(metrics))
    VariableSnapshots(TrainedModel(made)).build(SPEC)
    return made


class OtherDense(keras.layers.Dense):
    """A layer with the same variables as Dense."""


CHANGES = {
    "units": (
        lambda: model(units=9),
        r"the variable 'weights/2\.Dense/0'\. Received: float32 of shape \(6, 8\) \(sequential\w*/hidden/kernel\) in "
        r"the checkpoint\. Expected: float32 of shape \(6, 9\) \(sequential\w*/hidden/kernel\), as in this program\. .*"
        "another directory",
    ),
    "dtype": (lambda: model(dtype="float64"), r"weights/2\.Dense/0'\. Received: float32 .*Expected: float64"),
    "layer": (
        lambda: model(kind=OtherDense),
        r"weights/2\.OtherDense/0'\. Received: none .*Expected: float32 of shape",
    ),
    "one more layer": (lambda: model(more=True), r"weights/3\.Dense/0'\. Received: none .*\(8, 3\)"),
    "optimizer": (lambda: model(optimizer=keras.optimizers.SGD()), "the optimizer. Received: Adam in .*Expected: SGD,"),
    "switch": (
        lambda: model(optimizer=keras.optimizers.Adam(amsgrad=True)),
        "Adam's amsgrad. Received: amsgrad=False in .*Expected: amsgrad=True,",
    ),
    "schedule": (
        lambda: model(optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9))),
        "learning_rate. Received: learning_rate='variable' in .*Expected: learning_rate='CosineDecay',",
    ),
    "wrapped optimizer": (
        lambda: model(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())),
        "the optimizer. Received: Adam in .*Expected: LossScaleOptimizer,",
    ),
    "one metric more": (
        lambda: model(metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]),
        r"the variable 'metrics/1\.CompileMetrics/2'\. Received: none in .*Expected: float32 of shape \(\)",
    ),
    "one metric less": (
        lambda: model(metrics=[]),
        r"the variable 'metrics/1\.CompileMetrics/0'\. Received: float32 of shape \(\) .*Expected: none,",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_training_is_rejected(change):
    keras.utils.set_random_seed(0)
    state = saved(model())
    build, message = CHANGES[change]
    other = build()
    before = saved(other)
    with pytest.raises(ValueError, match=message):
        restore(other, state)
    for part in ("shared", "per_replica"):
        np.testing.assert_equal(saved(other)[part], before[part])
    assert python_and_numpy_state() == before["generators"]


def test_what_may_change_is_accepted():
    numbers = keras.optimizers.Adam(0.5, beta_1=0.8, clipnorm=1.0, name="other")
    restore(model(optimizer=numbers), saved(model()))


def test_another_compression_is_rejected(cpus):
    trained = made("accumulation", "powersgd")
    steps(trained, 0, 2)
    state = saved(trained)
    for compression, expected in (("powersgd:1", r"shape \(16, 1\)|shape \(3, 1\)"), (None, "no such state")):
        policy = Policy(compression, dense_below=0, dense_steps=1)
        with MirroredStrategy(cpus[:2], compression=policy).scope():
            other = trainings.CASES["accumulation"]()
        with pytest.raises(ValueError, match=rf"the compression of gradients \('compression/.*Expected: ({expected})"):
            restore(other, state)


def test_a_model_that_cannot_be_built_says_what_is_missing():
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    unbuilt.compile("sgd", loss="mse")
    for spec in (None, (tf.TensorSpec(None), tf.TensorSpec(None))):
        with pytest.raises(RuntimeError, match="before the first batch. Received: batches of .*known rank"):
            VariableSnapshots(TrainedModel(unbuilt)).build(spec)
    VariableSnapshots(TrainedModel(unbuilt)).build((tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])))
    assert VariableSnapshots(TrainedModel(unbuilt)).snapshot()[0]["weights/2.Dense/0"].shape == (3, 2)
