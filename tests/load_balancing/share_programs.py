"""Trainings with the same results on workers with moving shares and in one process."""

import keras
import numpy as np
import tensorflow as tf
import unequal_programs

STEPS, BATCH, FEATURES = 30, 16, 6
_random = np.random.default_rng(7)
INPUTS = _random.normal(size=(STEPS * BATCH - 11, FEATURES)).astype("float32")  # the last batch has 5 rows
TARGETS = _random.normal(size=(len(INPUTS), 2)).astype("float32")
WEIGHTS = _random.uniform(0.1, 2.0, size=len(INPUTS)).astype("float32")
TOKENS = _random.integers(0, 5, size=(40, 7)).astype("int32")  # 0 is masked


class Batches(keras.utils.PyDataset):
    """The batches of the arrays in their order."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return INPUTS[rows], TARGETS[rows]


def thirty_steps(strategy, *callbacks):
    """30 steps with accumulation, clipping, weights of samples and momentum."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2, global_clipnorm=0.3)
        model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"])
    arguments = {"sample_weight": WEIGHTS, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    history = model.fit(INPUTS, TARGETS, **arguments, callbacks=list(callbacks))
    return {"weights": model.get_weights(), "logs": unequal_programs.logs(history)}


def one_layer(strategy, create_optimizer=keras.optimizers.Adam, **compiled):
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(2)])
        model.compile(create_optimizer(), "mse", metrics=["mae"], **compiled)
    return model


def scaled_and_averaged():
    adam = keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=4, clipnorm=0.5)
    return keras.optimizers.LossScaleOptimizer(adam)


def py_dataset(strategy):
    """A PyDataset, with several steps in an execution, averages of the weights and a loss scale."""
    model = one_layer(strategy, scaled_and_averaged, steps_per_execution=4)
    before = INPUTS.copy(), TARGETS.copy()
    history = model.fit(Batches(), shuffle=False, verbose=0)
    changed = [int(np.sum(old != new)) for old, new in zip(before, (INPUTS, TARGETS), strict=True)]
    return {"weights": model.get_weights(), "logs": unequal_programs.logs(history), "changed": changed}


def masked(strategy):
    """A masked loss, whose divisor is a sum over all replicas in the forward pass."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = keras.layers.Embedding(5, 4, mask_zero=True), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((7,), dtype="int32"), *layers])
        model.compile(keras.optimizers.SGD(0.2), "mse")
    data = tf.data.Dataset.from_tensor_slices((TOKENS, TOKENS[..., None].astype("float32"))).batch(16)
    history = model.fit(data, epochs=2, verbose=0)
    prediction = model.predict(TOKENS, batch_size=16, verbose=0)
    return {"weights": model.get_weights(), "logs": unequal_programs.logs(history), "prediction": prediction}


def custom_loop(strategy):
    """A loop whose loss is a sum over the samples, divided by the size of the global batch."""
    model = one_layer(strategy)
    optimizer = model.optimizer

    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(inputs) - targets)) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(BATCH)
    losses = [float(train(batch)) for batch in strategy.experimental_distribute_dataset(data)]
    return {"weights": model.get_weights(), "losses": losses}


def compiled(strategy):
    """XLA compiles the layers for each size of the rows."""
    model = one_layer(strategy, jit_compile=strategy is not tf.distribute.get_strategy())
    history = model.fit(INPUTS, TARGETS, batch_size=BATCH, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "logs": unequal_programs.logs(history)}


def fixed_sizes(strategy, layer=None):
    """Full batches of a static size, which `layer` may look at."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = [layer] if layer else []
        model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(BATCH, drop_remainder=True)
    history = model.fit(data, verbose=0)
    return {"weights": model.get_weights(), "logs": unequal_programs.logs(history)}


PROGRAMS = {"custom_loop": custom_loop, "training": unequal_programs.training}
MORE = {
    "masked": masked,
    "py_dataset": py_dataset,
    "compiled": compiled,
    "accumulating": unequal_programs.accumulating,
    "eagerly": unequal_programs.eagerly,
    "ragged": unequal_programs.ragged,
}
ALL = {"thirty_steps": thirty_steps, **PROGRAMS, **MORE}
