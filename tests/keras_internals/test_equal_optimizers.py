"""Optimizers whose class defines `__eq__`, so that they have no hash, and two of them may be equal."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.callbacks import GradientAccumulation
from tfdist.strategies import MirroredStrategy

ROWS = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


class Momentum(keras.optimizers.SGD):
    def __eq__(self, other):
        return isinstance(other, Momentum)


def trained(strategy, optimizer_class=Momentum, callbacks=()):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(optimizer_class(0.1, momentum=0.9), "mse")
    model.fit(ROWS, ROWS[:, :2], batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda cpus: tf.distribute.get_strategy(),
        lambda cpus: tf.distribute.MirroredStrategy(cpus[:2]),
        lambda cpus: MirroredStrategy(cpus[:2]),
        lambda cpus: MirroredStrategy(cpus[:2], shard_optimizer_state=True),
    ],
    ids=["none", "stock", "replicas", "split slots"],
)
def test_they_train(cpus, make):
    MirroredStrategy(cpus[:2])  # replaces what optimizers do
    expected = trained(tf.distribute.get_strategy(), keras.optimizers.SGD)
    np.testing.assert_allclose(trained(make(cpus)), expected, rtol=0, atol=1e-6)


def test_one_under_a_strategy_of_tensorflow_does_not_change_an_equal_one(cpus):
    stock = tf.distribute.MirroredStrategy(cpus[:2])
    expected = trained(stock)
    trained(stock, callbacks=[GradientAccumulation(2)])
    np.testing.assert_array_equal(trained(stock), expected)
