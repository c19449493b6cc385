"""A training of six steps an epoch, as small as can be, with FailureRecovery."""

import keras
import numpy as np

from tfdist.callbacks import FailureRecovery

STEPS = 6
INPUTS = np.random.default_rng(0).normal(size=(4 * STEPS, 3)).astype("float32")
TARGETS = np.eye(3, dtype="float32")[np.random.default_rng(1).integers(0, 3, 4 * STEPS)]


def small_model(*, rate=0.1, metrics=(), of=keras.Sequential):
    keras.utils.set_random_seed(0)
    model = of([keras.Input((3,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.SGD(rate), "categorical_crossentropy", metrics=list(metrics))
    return model


def fit(directory, *callbacks, model=None, inputs=INPUTS, epochs=2, verbose=0, shuffle=True, **recovery):
    """Trains a new model, or `model`; returns the History and the weights."""
    model = small_model() if model is None else model
    recovery = FailureRecovery(directory, **recovery)
    how = {"batch_size": 4, "epochs": epochs, "verbose": verbose, "shuffle": shuffle}
    history = model.fit(inputs, TARGETS, callbacks=[recovery, *callbacks], **how)
    return history, model.get_weights()


def assert_same(one, other):
    """Compares History and weights, as `fit` returns them, bit by bit."""
    assert one[0].epoch == other[0].epoch and one[0].history == other[0].history
    assert all(np.array_equal(*pair) for pair in zip(one[1], other[1], strict=True))
