"""A small model with dense and sparse gradients, and the optimizers with which tests train it."""

import keras
import numpy as np
from keras import optimizers
from testing.models import numbers_and_words
from testing.optimizers import OPTIMIZERS as OF_ALL_TESTS
from testing.programs import Program

_random = np.random.default_rng(0)
NUMBERS = _random.normal(size=(24, 6)).astype("float32")
WORDS = _random.integers(0, 11, size=(24, 3)).astype("int32")
TARGETS = NUMBERS.sum(axis=1, keepdims=True) + np.sin(NUMBERS[:, :1])
BATCH = 8
WIDE = _random.normal(size=(61, 64)).astype("float32")


def everything(steps=2):
    """AdamW with a schedule, decay, clipping, averages and accumulation."""
    return OF_ALL_TESTS["everything"](gradient_accumulation_steps=steps)


_SAME = "momentum adam adamw adadelta adagrad adamax lion rmsprop clipnorm global_clipnorm clipvalue averages adafactor"
OPTIMIZERS = {
    **{name: OF_ALL_TESTS[name] for name in _SAME.split()},
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    # 2 ** 127 overflows at first, so that updates are skipped.
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=2.0**127),
    "everything": everything,
    # For which Keras without a strategy counts as tfdist does: no schedule and no averages.
    "resumed": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.2, gradient_accumulation_steps=2),
}


def compiled(strategy, optimizer, **arguments):
    """Returns a model of 447 parameters, with an embedding, and what `optimizer` returns."""
    return Program(lambda: numbers_and_words(11), optimizer=optimizer, compile=arguments).compiled(strategy)


def fit(model, epochs=2, **arguments):
    """Trains three steps an epoch, on all samples in their order."""
    return model.fit([NUMBERS, WORDS], TARGETS, BATCH, epochs, verbose=0, shuffle=False, **arguments)


def trained(strategy, optimizer, epochs=2, **arguments):
    """Returns a model that was trained with the optimizer that `optimizer` returns."""
    model = compiled(strategy, optimizer, **arguments)
    fit(model, epochs)
    return model


def wide(strategy):
    """Returns a model whose kernels are large enough to be split as weights."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(256, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])
        model.compile(optimizers.Adam(0.001, gradient_accumulation_steps=2, global_clipnorm=1.0), loss="mse")
    return model


def fit_wide(model, epochs=2, **arguments):
    """Trains four steps an epoch; the last batch has fewer rows."""
    return model.fit(WIDE, WIDE.sum(1, keepdims=True), 16, epochs, verbose=0, shuffle=False, **arguments)


def values(model):
    """Returns the weights, and the variables of the optimizer, by their numbers."""
    weights = {f"weight {number}": value for number, value in enumerate(model.get_weights())}
    return weights | {f"slot {number}": slot.numpy() for number, slot in enumerate(model.optimizer.variables)}


def owned_values(model):
    """Returns how many values of split slots each replica of this process holds."""
    slots = [slot for slot in model.optimizer.variables if hasattr(slot, "parts")]
    return [sum(int(slot.parts[replica].shape[0]) for slot in slots) for replica in range(len(slots[0].parts))]
