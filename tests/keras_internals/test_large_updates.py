"""XLA compiles the updates of large variables on CPUs, unless the user has decided otherwise."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from testing.data import Data
from testing.models import dense
from testing.programs import Program

from tfdist.keras_internals import optimizers
from tfdist.strategies import MirroredStrategy, worker_start
from tfdist.tensorflow_internals import xla_functions
from tfdist.tensorflow_internals.xla_functions import call_compiled

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(40, 8)).astype("float32")
TARGETS = RANDOM.normal(size=(40, 1)).astype("float32")


@pytest.fixture
def updated(monkeypatch):
    """The shapes of the gradients of each compiled update; variables are large from 60 values on."""
    shapes = []

    def counted(function, tensors):
        results = call_compiled(function, tensors)
        if results is not None:
            shapes.append([tuple(tensor.shape) for tensor in tensors])
        return results

    monkeypatch.setattr(optimizers, "call_compiled", counted)
    monkeypatch.setattr(optimizers, "LARGE_UPDATE", 60)
    return shapes


def train(cpus, optimizer, **arguments):
    keras.backend.clear_session()
    program = Program(lambda: dense(8, (8, 8)), Data(ROWS, TARGETS), optimizer, epochs=3, compile=arguments)
    model = program.trained(MirroredStrategy(cpus[:2])).model
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def adam():
    return keras.optimizers.Adam(0.01)


def decayed_average():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=4)


def accumulated():
    return keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2, global_clipnorm=0.5)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=64.0)


# By default tests/strategies/test_xla.py scales losses, tests/pipeline/test_large_updates_in_stages.py averages.
@pytest.mark.parametrize(
    "optimizer", [accumulated, *(pytest.param(one, marks=pytest.mark.long) for one in (adam, decayed_average, scaled))]
)
def test_updates_equal_those_without_xla(cpus, updated, optimizer):
    arguments = {"steps_per_execution": 3} if optimizer is adam else {}
    without = train(cpus, optimizer, jit_compile=False)
    assert not updated
    by_xla = train(cpus, optimizer, **arguments)
    assert updated == [[(8, 8), (8, 8)]] * 2  # on each replica, without the vectors and the last matrix
    for found, expected in zip(by_xla, without, strict=True):
        # 15 updates of rate 0.01, each with a few roundings of 6e-8
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


class OwnUpdate(keras.optimizers.SGD):
    """Sees all its variables in Python."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("optimizer", [keras.optimizers.Nadam, OwnUpdate])
def test_updates_that_depend_on_each_other_or_are_unknown_are_not_compiled(cpus, updated, optimizer):
    train(cpus, lambda: optimizer(0.01))
    assert not updated


def test_sparse_gradients_are_left_out(cpus, updated):
    with MirroredStrategy(cpus[:2]).scope():
        layers = [keras.layers.Embedding(20, 8), keras.layers.Flatten(), keras.layers.Dense(4), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adam(0.01), loss="mse")
    model.fit(RANDOM.integers(0, 20, (8, 4)), TARGETS[:8], batch_size=8, verbose=0)
    assert updated == [[(32, 4)]] * 2


def test_a_custom_loop_has_them_too(cpus, updated):
    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        model, optimizer = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)]), adam()
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(rows):
        def on_replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(rows) ** 2) / 2
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(on_replica)

    step(tf.constant(ROWS))
    assert updated == [[(8, 8)]] * 2
    assert optimizer.iterations.numpy() == 1


class CountingDecay(keras.optimizers.AdamW):
    """Counts its updates where it decays the weights."""

    updates = 0

    def _apply_weight_decay(self, variables):
        self.updates += 1
        super()._apply_weight_decay(variables)


def test_a_subclass_with_its_own_parts_of_an_update_runs_them_once(cpus, updated):
    with MirroredStrategy(cpus[:1]).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile(CountingDecay(0.01, weight_decay=0.1), loss="mse")
    model.fit(ROWS, TARGETS, batch_size=40, verbose=0)
    assert not updated
    assert model.optimizer.updates == 1  # it is traced once


def test_workers_with_different_cpus_leave_xla_to_users(cpus, updated, monkeypatch):
    monkeypatch.setattr(xla_functions, "_other_cpus", ())
    xla_functions.leave_xla_to_users([1])
    train(cpus, adam)
    assert not updated
    assert worker_start.cpu_instructions() == worker_start.cpu_instructions() != 0
