"""Trainings with the same results on N workers and on fewer workers with more micro-batches."""

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.strategy_protocol import training_strategy

ROWS, FEATURES, CLASSES = 44, 6, 3  # batches of 16, 16 and 12: four parts of each are even
# A dozen updates of sums that associate differently; Adam passes on the relative error of small gradients.
TOLERANCE = 2e-5
_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(ROWS, FEATURES)).astype("float32")
LABELS = _random.integers(0, CLASSES, size=ROWS).astype("int32")


class Own(keras.layers.Layer):
    """A layer with states that are synchronized over the replicas in three ways."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(), trainable=False, initializer="zeros", aggregation="mean")
        self.first = self.add_weight(shape=(), trainable=False, initializer="zeros", aggregation="only_first_replica")
        self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros", dtype="int32")

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs))
            self.first.assign(0.9 * self.first + 0.1 * keras.ops.mean(inputs))
            self.calls.assign(self.calls + 1)
        return inputs


def network(*, own=True):
    """Dropout, batch normalization and states: everything that distinguishes parts of a batch."""
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(32, use_bias=False),  # its gradient would be 0 but for rounding, which Adam makes large
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.4),
            *([Own()] if own else []),
            keras.layers.Dense(24, activation="tanh"),
            keras.layers.Dense(CLASSES),
        ]
    )


def plain_network():
    """Nothing in it distinguishes parts of a batch, so any split of the batch computes the same."""
    keras.utils.set_random_seed(5)
    layers = keras.layers.Dense(24, activation="tanh"), keras.layers.Dense(CLASSES)
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


class Adversaries(keras.Model):
    """The second optimizer's loss is computed with what the first one's update has just made."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = network(), network()

    def call(self, inputs):
        return self.judge(inputs)

    def compile(self, maker_optimizer, judge_optimizer):
        super().compile()
        self.maker_optimizer, self.judge_optimizer = maker_optimizer, judge_optimizer

    def train_step(self, data):
        inputs, labels = data
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def judged(sign):
            made = keras.ops.pad(self.maker(inputs, training=True), [[0, 0], [0, FEATURES - CLASSES]])
            return sign * loss_of(labels, self.judge(inputs + made, training=True))

        for network_, optimizer, sign in (
            (self.judge, self.judge_optimizer, 1.0),
            (self.maker, self.maker_optimizer, -1.0),
        ):
            with tf.GradientTape() as tape:
                loss = judged(sign)
            variables = network_.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"first": keras.ops.mean(inputs)}


def fitted(strategy, optimizer, *, epochs=3, run_eagerly=False):
    with strategy.scope():
        model = network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=run_eagerly)
    data = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(16)
    history = model.fit(data, epochs=epochs, verbose=0)
    return {
        "weights": model.get_weights(),
        "logs": [history.history[name] for name in sorted(history.history)],
        "iterations": [int(optimizer.iterations.numpy())],
    }


def everything(strategy):
    """What one optimizer may ask for at once."""
    with strategy.scope():
        optimizer = keras.optimizers.Adam(
            0.01, global_clipnorm=0.5, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=3
        )
    return fitted(strategy, optimizer)


def eagerly(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.Adam(0.01)
    return fitted(strategy, optimizer, epochs=1, run_eagerly=True)


def adversaries(strategy):
    with strategy.scope():
        model = Adversaries()
        optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(*optimizers)
    data = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(16)
    history = model.fit(data, epochs=2, verbose=0)
    return {
        "weights": model.get_weights(),
        "logs": history.history["first"],
        "iterations": [int(optimizer.iterations.numpy()) for optimizer in optimizers],
    }


PROGRAMS = {program.__name__: program for program in (everything, eagerly, adversaries)}


def compressed(strategy):
    """Without what differs from part to part, so that k micro-batches are one larger batch to a compressor."""
    with strategy.scope():
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(64), keras.layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    before = training_strategy(strategy).communication
    model.fit(tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(16), epochs=2, verbose=0)
    sent = training_strategy(strategy).communication - before
    state = training_strategy(strategy).compression_state
    residuals = [
        entries["residual"].numpy()
        for replica in (state.replicas.values() if state is not None else ())
        for entries in replica.entries.values()
        if "residual" in entries
    ]
    return {
        "weights": model.get_weights(),
        "residuals": residuals,
        "exchanges": [sent.gradient_collectives, sent.wire_bytes],
    }


def flat(outcomes):
    """By `name/key/index`, arrays."""
    return {
        f"{name}/{key}/{index}": np.asarray(value)
        for name, outcome in outcomes.items()
        for key, values in outcome.items()
        for index, value in enumerate(values)
    }


def of(arrays, name):
    """The arrays of one outcome."""
    return {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}


def assert_close(ours, theirs, tolerance=TOLERANCE):
    """Compares arrays by their names."""
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)
