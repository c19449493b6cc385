"""A small model with dense and sparse gradients, and the optimizers with which tests train it."""

import keras
import numpy as np
from keras import optimizers

_random = np.random.default_rng(0)
NUMBERS = _random.normal(size=(24, 6)).astype("float32")
WORDS = _random.integers(0, 11, size=(24, 3)).astype("int32")
TARGETS = NUMBERS.sum(axis=1, keepdims=True) + np.sin(NUMBERS[:, :1])
BATCH = 8


def everything(steps=2):
    """AdamW with a schedule, decay, clipping, averages and accumulation."""
    return optimizers.AdamW(
        optimizers.schedules.ExponentialDecay(0.1, 2, 0.9),
        weight_decay=0.1,
        global_clipnorm=0.2,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=steps,
    )


OPTIMIZERS = {
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "lion": lambda: optimizers.Lion(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.2),
    "clipvalue": lambda: optimizers.SGD(0.1, momentum=0.9, clipvalue=0.01),
    "averages": lambda: optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    # 2 ** 127 overflows at first, so that updates are skipped.
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=2.0**127),
    "everything": everything,
    # Has whole variables, and factors of slots.
    "adafactor": lambda: optimizers.Adafactor(0.01),
    # For which Keras without a strategy counts as tfdist does: no schedule and no averages.
    "resumed": lambda: optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.2, gradient_accumulation_steps=2),
}


def compiled(strategy, optimizer, **arguments):
    """Returns a model of 447 parameters, with an embedding, and what `optimizer` returns."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        numbers, words = keras.Input((6,)), keras.Input((3,), dtype="int32")
        embedded = keras.layers.Flatten()(keras.layers.Embedding(11, 5)(words))
        inner = keras.layers.Dense(17, activation="tanh")(keras.layers.Concatenate()([numbers, embedded]))
        model = keras.Model([numbers, words], keras.layers.Dense(1)(inner))
        model.compile(optimizer(), loss="mse", **arguments)
    return model


def fit(model, epochs=2, **arguments):
    """Trains three steps an epoch, on all samples in their order."""
    return model.fit([NUMBERS, WORDS], TARGETS, BATCH, epochs, verbose=0, shuffle=False, **arguments)


def trained(strategy, optimizer, epochs=2, **arguments):
    """Returns a model that was trained with the optimizer that `optimizer` returns."""
    model = compiled(strategy, optimizer, **arguments)
    fit(model, epochs)
    return model


def values(model):
    """Returns the weights, and the variables of the optimizer, by their numbers."""
    weights = {f"weight {number}": value for number, value in enumerate(model.get_weights())}
    return weights | {f"slot {number}": slot.numpy() for number, slot in enumerate(model.optimizer.variables)}


def owned_values(model):
    """Returns how many values of split slots each replica of this process holds."""
    slots = [slot for slot in model.optimizer.variables if hasattr(slot, "parts")]
    return [sum(int(slot.parts[replica].shape[0]) for slot in slots) for replica in range(len(slots[0].parts))]
