"""Trainings on two workers of two devices: a loss jumps, a bit of a weight changes, or one of a gradient."""

import keras
import numpy as np
from flipped_gradients import FlippedGradients

from tfdist.callbacks import SpikeGuard, WeightComparison
from tfdist.callbacks.gradient_comparison import DifferentGradientsError
from tfdist.callbacks.weight_comparison import DifferentWeightsError
from tfdist.keras_internals.model_state import components

BATCHES, ROWS = 12, 6
SPIKE = 8  # the batch
INPUTS = np.random.default_rng(1).normal(size=(BATCHES, ROWS, 3)).astype("float32")
TARGETS = np.tanh(INPUTS.sum(axis=2, keepdims=True))


def fit(strategy, batches, *callbacks, layers=(), **options):
    """Returns the weights after an epoch."""
    targets = TARGETS.copy()
    targets[SPIKE] *= 1e6
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    data = [array[batches].reshape(-1, array.shape[2]) for array in (INPUTS, targets)]
    model.fit(*data, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[*callbacks])
    return [weight.tolist() for weight in model.get_weights()]


class Flip(keras.callbacks.Callback):
    """Changes a bit of a weight on the second device of worker 1, after the third step."""

    def on_train_batch_end(self, batch, logs=None):
        strategy = self.model.distribute_strategy
        if strategy.rank == 1 and batch == 2:
            copy = components(strategy, self.model.trainable_variables[0])[1]
            bits = copy.numpy().view(np.uint32)
            bits[0, 0] ^= 1 << 6
            copy.assign(bits.view(np.float32))


def guarded(strategy):
    """What the test checks."""
    seen = {}
    for steps in (1, 5):
        guard, comparison = SpikeGuard(window=6, deviations=100.0), WeightComparison(4, check_gradients=0.5)
        weights = fit(strategy, range(BATCHES), guard, comparison, steps_per_execution=steps)
        spikes = [(spike.batch, spike.name) for spike in guard.spikes]
        seen[f"{steps} steps"] = {"weights": weights, "spikes": spikes, "comparisons": comparison.comparisons}
    try:
        fit(strategy, range(BATCHES), Flip(), WeightComparison(4))
    except DifferentWeightsError as error:
        seen["error"], seen["ranks"] = str(error), error.ranks
    try:
        flips = FlippedGradients(lambda device: strategy.rank == 1 and device.endswith("CPU:1"))
        fit(strategy, range(BATCHES), WeightComparison(4, check_gradients=0.5), layers=[flips])
    except DifferentGradientsError as error:
        seen["gradient error"], seen["gradient ranks"] = str(error), error.ranks
    return seen
