"""Callbacks under stages: a training resumes bit-identically after an interruption, others work or refuse."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.callbacks import CommunicationReport, FailureRecovery, GradientAccumulation, TrainingMonitor
from tfdist.strategies import ModelParallelStrategy, Pipeline

X, Y = np.random.default_rng(0).normal(size=(2, 44, 12)).astype("float32")


class Interruption(keras.callbacks.Callback):
    """Raises after some steps."""

    is_stateless = True

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps -= 1
        if not self.steps:
            raise KeyboardInterrupt


def made(cpus: list[str], columns: int = 2) -> keras.Model:
    keras.utils.set_random_seed(3)
    strategy = ModelParallelStrategy(cpus[: 2 * columns], pipeline=Pipeline(stages=2), data_parallel=columns)
    with strategy.scope():
        middle = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1)]
        model = keras.Sequential([keras.Input((12,)), *middle, keras.layers.Dense(12)])
        model.compile(keras.optimizers.Adam(1e-2, use_ema=True), "mse", metrics=["mae"])
    return model


def train(model: keras.Model, *callbacks: keras.callbacks.Callback) -> dict[str, Any]:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(44, seed=2).batch(8)  # six steps an epoch
    return model.fit(data, epochs=3, verbose=0, callbacks=list(callbacks)).history


def state(model: keras.Model) -> list[Any]:
    variables = [*model.variables, *model.optimizer.variables]
    copies = [copy for variable in variables for copy in getattr(variable._value, "copies", ())]
    return [one.numpy() for one in (*variables, *copies)]


@pytest.mark.parametrize("columns", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_interrupted_training_resumes_bit_identically(cpus: list[str], tmp_path: Any, columns: int) -> None:
    undisturbed = made(cpus, columns)
    history = train(undisturbed, FailureRecovery(tmp_path / "a", every_steps=2))
    interrupted = made(cpus, columns)
    with pytest.raises(KeyboardInterrupt):
        train(interrupted, FailureRecovery(tmp_path / "b", every_steps=2), Interruption(9))
    resumed = made(cpus, columns)
    assert train(resumed, FailureRecovery(tmp_path / "b", every_steps=2)) == history
    for found, expected in zip(state(resumed), state(undisturbed), strict=True):
        np.testing.assert_array_equal(found, expected)


def plain(strategy: Any) -> keras.Model:
    """A model whose results depend neither on stages nor on columns."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        hidden = [keras.layers.Dense(16, "relu"), keras.layers.Dense(16, "tanh")]
        model = keras.Sequential([keras.Input((12,)), *hidden, keras.layers.Dense(12)])
        model.compile(keras.optimizers.Adam(1e-2, use_ema=True), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(("stages", "columns"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_a_training_resumes_with_other_stages_and_columns(
    cpus: list[str], tmp_path: Any, stages: int, columns: int
) -> None:
    one_process = plain(tf.distribute.get_strategy())
    history = train(one_process)
    interrupted = plain(ModelParallelStrategy(cpus[:2], pipeline=Pipeline(stages=1), data_parallel=2))
    with pytest.raises(KeyboardInterrupt):
        train(interrupted, FailureRecovery(tmp_path, every_steps=2, background=False), Interruption(9))
    pipeline = Pipeline(stages=stages)
    resumed = plain(ModelParallelStrategy(cpus[: stages * columns], pipeline=pipeline, data_parallel=columns))
    found = train(resumed, FailureRecovery(tmp_path))
    # Sums of float32 in another order; Adam's steps are of 1e-2.
    for name, values in history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
    for variable, expected in zip(resumed.variables, one_process.variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), atol=2e-5)
    copies = [(one._value, copy) for one in resumed.optimizer.variables for copy in getattr(one._value, "copies", ())]
    assert all(np.array_equal(one.numpy(), copy.numpy()) for one, copy in copies)


@pytest.mark.long
def test_other_callbacks(cpus: list[str], tmp_path: Any) -> None:
    model, reference = made(cpus), made(cpus)
    reference.optimizer.gradient_accumulation_steps = None
    train(model, TrainingMonitor(tmp_path), CommunicationReport(print_table=False))
    train(reference)
    for found, expected in zip(state(model), state(reference), strict=True):
        np.testing.assert_array_equal(found, expected)
    accumulating = made(cpus)
    train(accumulating, GradientAccumulation(2))
    assert int(accumulating.optimizer.iterations.numpy()) == 9
