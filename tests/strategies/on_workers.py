"""The program of two workers with two devices each. Each rank writes its observations.

They are for `test_multi_worker_strategy.py` and `test_shared_paths.py`, then for `test_compression_on_workers.py`.
"""

import contextlib
import copy
import json
import random
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from on_workers_batches import asked_for_batches
from on_workers_compression import exchange
from on_workers_files import outcome, write_files
from on_workers_guards import guarded

from tfdist.callbacks import FailureRecovery, GradientAccumulation
from tfdist.strategies import MultiWorkerMirroredStrategy

INPUTS = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)


def compiled(strategy, **arguments):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, **arguments), loss="mse")
    return model


def digest(model):
    return float(np.sum([np.sum(weight.astype("float64")) for weight in model.get_weights()]))


def samples_of(strategy, order):
    """The samples that this worker gets of one pass."""
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(order).batch(12))
    own = [local.numpy() for batch in distributed for local in strategy.experimental_local_results(batch)]
    return np.concatenate(own).tolist()


def updates_of_different_graphs(strategy):
    """How far a sum of whole numbers is off after updates in functions that rank 1 traces more often than rank 0."""
    with strategy.scope():
        weights = tf.Variable(tf.zeros([4]))
        pair = tf.Variable(tf.zeros([2, 2]))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weights, pair])

    def replica_step(rows):
        summed = tf.reduce_sum(rows, axis=0)
        optimizer.apply_gradients([(summed, weights), (tf.reshape(summed, [2, 2]), pair)])

    @tf.function
    def step(rows):
        strategy.run(replica_step, args=(rows,))

    @tf.function
    def steps(rows, count):
        for _ in tf.range(count):
            strategy.run(replica_step, args=(rows,))

    sent = 0
    for turn in range(6):
        count = 3 + (turn % 3 if strategy.rank == 1 else 0)
        step(tf.ones([count, 4]))
        steps(tf.ones([count, 4]), 20)
        sent += 21 * 2 * (3 + 3 + turn % 3)
    expected = np.full([4], -sent)
    return float(np.abs(weights.numpy() - expected).max() + np.abs(pair.numpy().ravel() - expected).max())


class StaticRows(keras.layers.Layer):
    """Returns its input, and needs a static number of rows."""

    def call(self, inputs):
        return tf.reshape(inputs, [inputs.shape[0] * 4 // 4, 4])


def static_sizes(strategy, folder):
    """The digests of a training with batches of a static size, and of one that resumes in the middle of an epoch."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise InterruptedError

    def fit(name, *callbacks):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            rows = keras.Input(batch_shape=(3, 4))
            model = keras.Model(rows, keras.layers.Dense(1)(StaticRows()(rows)))
            model.compile(keras.optimizers.SGD(0.1), loss="mse")
        data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).shuffle(48, seed=2).batch(12, drop_remainder=True)
        recovery = FailureRecovery(folder / name, every_steps=1)
        model.fit(data, epochs=2, verbose=0, callbacks=[recovery, *callbacks])
        return digest(model)

    with contextlib.suppress(InterruptedError):
        fit("resumed", Stop())
    return [fit("complete"), fit("resumed")]


def reduce_after_the_end_of_another(folder):
    """Worker 1 reduces once more, eagerly, and so each device in a thread. Worker 0 ends its training."""
    strategy = MultiWorkerMirroredStrategy()
    if strategy.rank == 1:
        values = strategy.run(lambda: tf.constant(1.0))
        (folder / "reduced-alone").write_text(str(outcome(lambda: float(strategy.reduce("SUM", values, axis=None)))))


def main(folder: Path) -> None:
    devices = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(devices[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    tf.zeros([])  # TensorFlow has started before there is a strategy
    strategy = MultiWorkerMirroredStrategy()
    seen = {"rank": strategy.rank, "workers": strategy.num_workers, "replicas": strategy.num_replicas_in_sync}
    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(12)

    # No seed is set, and the workers' initial weights and shuffles still agree.
    shuffled = strategy.experimental_distribute_dataset(tf.data.Dataset.range(48).shuffle(48).batch(12))
    own = [local.numpy() for batch in shuffled for local in strategy.experimental_local_results(batch)]
    seen["samples"] = np.concatenate(own).tolist()
    # Nor for Python's draws, and the order of sets.
    by_hash = [int(name.removeprefix("class ")) for name in {f"class {number}" for number in range(48)}]
    in_python = [np.random.permutation(48), random.sample(range(48), 48), by_hash]
    seen["python_samples"] = [samples_of(strategy, np.array(order)) for order in in_python]

    model = compiled(strategy)
    model.fit(data, verbose=0)
    seen["digest"] = digest(model)
    prediction = model.predict(data, verbose=0)
    seen["prediction_error"] = float(np.abs(prediction - model.predict_on_batch(INPUTS)[: len(INPUTS)]).max())

    before = strategy.communication
    model.fit(data, verbose=0, callbacks=[GradientAccumulation(4)])  # four micro-steps, one update
    seen["exchanges_of_an_update"] = (strategy.communication - before).gradient_collectives

    second = MultiWorkerMirroredStrategy()  # in the same process, over the same exchange
    other = compiled(second)
    for _ in range(2):
        other.fit(data, verbose=0)
        model.fit(data, verbose=0)
    seen["second_digest"] = digest(other)

    try:
        copy.deepcopy(strategy)
    except ValueError as error:
        seen["error_of_a_copy"] = str(error)
    if strategy.rank == 0:  # saving takes no other worker
        model.save(folder / "chief.keras")
    seen["error_of_different_graphs"] = updates_of_different_graphs(strategy)
    values = strategy.run(lambda: {"one": tf.constant(1.0), "pair": tf.constant([1.0, 2.0])})
    reduced = strategy.reduce("SUM", values, axis=None)
    seen["reduced"] = [float(reduced["one"]), reduced["pair"].numpy().tolist()]
    with strategy.scope():
        mirrored = tf.Variable(2.0)
    try:
        strategy.reduce("SUM", mirrored, axis=None)
        seen["reduced_variable"] = "returned"
    except (AssertionError, ValueError):
        seen["reduced_variable"] = "rejected"
    shared = strategy.run(model.test_step, args=((tf.constant(INPUTS), tf.constant(TARGETS)),))["loss"]
    mean, total = (float(strategy.reduce(op, shared, axis=None)) for op in ("MEAN", "SUM"))
    seen["sum_over_mean"] = total / mean
    epochs = []
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(other, "stop_training", batch == 1),
        on_epoch_end=lambda epoch, logs: epochs.append(epoch),
    )
    other.fit(data, verbose=0, callbacks=[stop], epochs=3)
    # Nothing makes it equal. One batch, since an earlier difference may be known before a second one is drawn.
    samples_of(second, np.random.default_rng().permutation(12))
    try:
        second._batch_comparison.end(only_new=False)
        seen["difference"] = ""
    except ValueError as error:
        seen["difference"] = str(error)
    seen["epochs_until_the_stop"] = len(epochs)
    seen["static_sizes"] = static_sizes(strategy, folder)
    seen["asked_for_batches"] = asked_for_batches(strategy)
    seen["guards"] = guarded(strategy)
    Path(folder, f"seen-{strategy.rank}.json").write_text(json.dumps(seen))
    write_files(strategy, folder / "shared")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exchange(Path(sys.argv[1]))
    reduce_after_the_end_of_another(Path(sys.argv[1]))
