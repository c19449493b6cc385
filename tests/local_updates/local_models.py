"""A small model and its data, and an independent reference of local updates in NumPy and stock Keras."""

import contextlib

import keras
import numpy as np

from tfdist.strategies import DiLoCo

_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(48, 6)).astype("float32")
TARGETS = (INPUTS.sum(axis=1, keepdims=True) + np.sin(INPUTS[:, :1])).astype("float32")
BATCH = 12
MODE = DiLoCo(sync_every=3, fragments=2, overlap_steps=2)


def compiled(strategy, optimizer, *, normalizes=False, **arguments):
    """Returns a model of 65 parameters that is compiled with what `optimizer` returns."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh")]
        layers += [keras.layers.BatchNormalization()] * normalizes
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(optimizer(), loss="mse", metrics=["mae"], **arguments)
    return model


def fit(model, samples=48, epochs=2, **arguments):
    """Trains on the first samples in their order; four batches an epoch of all samples."""
    return model.fit(INPUTS[:samples], TARGETS[:samples], BATCH, epochs, verbose=0, shuffle=False, **arguments)


def weights(model):
    """Returns the weights by their numbers."""
    return {f"weight {number}": value for number, value in enumerate(model.get_weights())}


class ReferenceWorkers:
    """Local updates of two workers in one process: a stock Keras model for each, exchanges by hand.

    Args:
      optimizer: returns the inner optimizer.
      groups: the positions of the weights of each fragment.
      sync_every, overlap_steps, kept_share: as in DiLoCo.
      outer: returns the outer optimizer of a fragment, or None for the mean.
      devices: of each worker. TensorFlow gives the parts of a batch, one for each device, to the workers in turn.
    """

    def __init__(self, optimizer, groups, sync_every, overlap_steps=0, kept_share=0.0, outer=None, devices=1):
        self.models = [compiled(_NoStrategy, optimizer) for _ in range(2)]
        self.anchors = [keras.Variable(value) for value in self.models[0].get_weights()]
        self.groups, self.sync_every = groups, sync_every
        self.overlap_steps, self.kept_share = overlap_steps, kept_share
        self.outer = [outer() if outer else None for _ in groups]
        self.rows = np.arange(BATCH).reshape(devices, 2, -1).swapaxes(0, 1).reshape(2, -1)  # of a batch, by worker
        self.under_way = []  # (update at which the mean is used, fragment, mean differences)
        self.updates = 0

    def train(self, epochs=2):
        for _ in range(epochs):
            for first in range(0, len(INPUTS), BATCH):
                for rows, model in zip(first + self.rows, self.models, strict=True):
                    model.train_on_batch(INPUTS[rows], TARGETS[rows])
                self._after_update()
            self.flush()
        return self.models[0].get_weights()

    def flush(self):
        while self.under_way:
            self._use(*self.under_way.pop(0)[1:], self.kept_share)
        is_equal = len(self.groups) == 1 and not self.overlap_steps and self.updates % self.sync_every == 0
        if not is_equal or self.kept_share:
            for fragment in range(len(self.groups)):
                self._use(fragment, self._differences(fragment), 0.0)
        self.updates = 0

    def _after_update(self):
        self.updates += 1
        while self.under_way and self.under_way[0][0] == self.updates:
            self._use(*self.under_way.pop(0)[1:], self.kept_share)
        for fragment in range(len(self.groups)):
            turn = (fragment + 1) * self.sync_every // len(self.groups)
            if self.updates % self.sync_every == turn % self.sync_every:
                self.under_way.append((self.updates + self.overlap_steps, fragment, self._differences(fragment)))
        if not self.overlap_steps:
            while self.under_way:
                self._use(*self.under_way.pop(0)[1:], self.kept_share)

    def _differences(self, fragment):
        own = [model.get_weights() for model in self.models]
        means = {i: np.mean([values[i] for values in own], axis=0) for i in self.groups[fragment]}
        return [self.anchors[i].numpy() - mean for i, mean in means.items()]

    def _use(self, fragment, differences, kept_share):
        anchors = [self.anchors[position] for position in self.groups[fragment]]
        if self.outer[fragment] is None:
            for anchor, difference in zip(anchors, differences, strict=True):
                anchor.assign(anchor - difference)
        else:
            self.outer[fragment].apply([keras.ops.convert_to_tensor(one) for one in differences], anchors)
        for model in self.models:
            values = model.get_weights()
            for position in self.groups[fragment]:
                values[position] = kept_share * values[position] + (1 - kept_share) * self.anchors[position].numpy()
            model.set_weights(values)


class _NoStrategy:
    scope = staticmethod(contextlib.nullcontext)
