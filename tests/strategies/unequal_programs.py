"""Trainings with the same results on workers with different numbers of devices and in one process."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.callbacks import FailureRecovery

ROWS, FEATURES, CLASSES = 29, 5, 3  # batches of 8, 8, 8 and 5
_random = np.random.default_rng(1)
INPUTS = _random.normal(size=(ROWS, FEATURES)).astype("float32")
LABELS = _random.integers(0, CLASSES, size=ROWS).astype("int32")
ARRAYS = INPUTS, LABELS


def set_devices():
    """Gives each worker one device more than the one before; the first has one. Returns the rank of this worker."""
    rank, cpu = cluster.detect().rank, tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * (1 + rank))
    return rank


def compiled(strategy, *, synchronized=True, **optimizer):
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(CLASSES)]
        if synchronized:
            layers.insert(1, keras.layers.BatchNormalization(synchronized=True))
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9, **optimizer), loss, metrics=["accuracy"])
    return model


def batches(size=8):
    return tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).shuffle(ROWS, seed=4).batch(size)


def logs(history):
    return [history.history[name] for name in sorted(history.history)]


def training(strategy):
    model = compiled(strategy, global_clipnorm=0.5)
    history = model.fit(batches(), epochs=2, validation_data=batches(7), verbose=0)
    plain = tf.data.Dataset.from_tensor_slices(INPUTS)
    return {
        "weights": model.get_weights(),
        "logs": logs(history),
        "evaluation": model.evaluate(INPUTS, LABELS, batch_size=8, verbose=0),
        "prediction": [model.predict(plain.batch(8), verbose=0), model.predict_on_batch(INPUTS[:8])],
    }


def accumulating(strategy, *callbacks):
    model = compiled(strategy, gradient_accumulation_steps=2)
    history = model.fit(*ARRAYS, batch_size=8, epochs=2, shuffle=False, callbacks=list(callbacks), verbose=0)
    return {"logs": logs(history), "weights": model.get_weights()}


def resumed(create_strategy, folder):
    """The outcome of `accumulating` that another `fit` resumes in the middle of an accumulation, and its strategy."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise InterruptedError

    def fit(*callbacks):
        strategy = create_strategy()
        return accumulating(strategy, FailureRecovery(folder, every_steps=1), *callbacks), strategy

    with contextlib.suppress(InterruptedError):
        fit(Stop())
    return fit()


def eagerly(strategy):
    model = compiled(strategy, synchronized=False)
    model.run_eagerly = True
    return {"logs": logs(model.fit(batches(29), verbose=0)), "weights": model.get_weights()}


def ragged(strategy):
    """Batches whose sizes are known at no time, of ragged rows."""
    table = tf.reshape(tf.range(20.0), [10, 2])
    rows = tf.ragged.range([1, 2, 3, 4, 5, 6, 7])
    data = tf.data.Dataset.from_tensor_slices(rows).ragged_batch(4).filter(lambda row: True)

    @tf.function
    def total(batch):
        return strategy.reduce("SUM", strategy.run(lambda ids: tf.reduce_sum(tf.gather(table, ids)), (batch,)), None)

    return {"totals": [total(batch).numpy() for batch in strategy.experimental_distribute_dataset(data)]}


class StaticRows(keras.layers.Layer):
    """Returns its input, and needs a static number of rows."""

    def call(self, inputs):
        return tf.reshape(inputs, [inputs.shape[0] * inputs.shape[1] // FEATURES, FEATURES])


def static_sizes(strategy):
    """Full batches of 9, of which each replica has 3 rows."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        rows = keras.Input(batch_shape=(9 // strategy.num_replicas_in_sync, FEATURES))
        model = keras.Model(rows, keras.layers.Dense(CLASSES)(StaticRows()(rows)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(9, drop_remainder=True)
    return {"logs": logs(model.fit(data, epochs=2, verbose=0)), "weights": model.get_weights()}


PROGRAMS = {program.__name__: program for program in (training, accumulating, eagerly, ragged, static_sizes)}
