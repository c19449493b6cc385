"""A model of one layer, and data that it can learn."""

import keras
import numpy as np

INPUTS = np.random.default_rng(0).normal(size=(48, 64)).astype("float32")
TARGETS = INPUTS[:, :48].copy()


def compiled(strategy, **arguments):
    """A kernel of 64 x 48 and a bias of 48, which is too small to be compressed."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(48)])
        model.compile(keras.optimizers.SGD(0.1), loss="mse", **arguments)
    return model
