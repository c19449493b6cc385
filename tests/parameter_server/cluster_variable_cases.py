"""Cases of variables: placement, split tables, saving, and custom training loops."""

from pathlib import Path
from typing import Any

import data_cases
import keras
import numpy as np
import tensorflow as tf
from cluster_cases import INPUTS, LABELS, Outcome, case, classifier, compared, compiled
from comparison import largest_difference

from tfdist.strategies import ParameterServerStrategy, Synchronous

TWO_PARTS = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)


@case
def placement(_: Path) -> Outcome:
    """Variables of very different sizes, and Adam's state."""
    strategy = ParameterServerStrategy()

    def model() -> keras.Model:
        sizes = (50, 7, 31, 3)
        return keras.Sequential([keras.Input((20,)), *(keras.layers.Dense(size) for size in sizes)])

    built = compiled(strategy, lambda: keras.optimizers.Adam(0.01), model)
    inputs = np.ones((8, 20), "float32")
    built.fit(inputs, np.zeros(8), batch_size=4, verbose=0)
    states = {variable.path: variable.value.device for variable in built.optimizer.variables}
    beside = [
        next(device for path, device in states.items() if path.endswith("momentum") and _is_of(path, variable))
        == variable.value.device
        for variable in built.trainable_variables
    ]
    return {
        "server_bytes": strategy.server_bytes,
        "optimizer_bytes": strategy.server_optimizer_bytes,
        "by_server": _bytes_by_server(built.variables + built.metrics_variables + built.optimizer.variables[:2]),
        "by_server_of_optimizer": _bytes_by_server(built.optimizer.variables[2:]),  # without count and rate
        "largest": max(variable.numpy().nbytes for variable in built.variables),
        "jobs": sorted({device[:7] for device in states.values()}),
        "beside": beside,
    }


def _bytes_by_server(variables: Any) -> list[int]:
    found = [0, 0]
    for variable in variables:
        found[int(variable.value.device.partition("/job:ps/replica:0/task:")[2][0])] += variable.numpy().nbytes
    return found


def _is_of(state: str, variable: Any) -> bool:
    return variable.path.replace("/", "_") in state


def _of_dense_table(strategy: Any) -> Outcome:
    return data_cases._embedded(strategy, data_cases._DenseEmbedding, global_clipnorm=0.1)


def _one_table(outcome: Outcome) -> Outcome:
    """Joins the parts of a table, which are the first weights."""
    weights = outcome["weights"]
    return {**outcome, "weights": [np.concatenate(weights[:2]), *weights[2:]]}


def _in_two_parts(strategy: Any) -> Outcome:
    return _one_table(data_cases._embedded(strategy, keras.layers.Embedding, global_clipnorm=0.1))


compared(
    "table_in_two_parts",
    lambda: ParameterServerStrategy(variable_partitioner=TWO_PARTS, mode=Synchronous()),
    _in_two_parts,
    _of_dense_table,
)


@case
def rows_of_a_table(_: Path) -> Outcome:
    """Of 10,000 rows, a batch looks up three."""
    strategy = ParameterServerStrategy(variable_partitioner=TWO_PARTS)

    def model() -> keras.Model:
        layers = [keras.layers.Embedding(10_000, 8), keras.layers.Flatten(), keras.layers.Dense(1, use_bias=False)]
        return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])

    built = compiled(strategy, lambda: keras.optimizers.SGD(0.1), model, loss="mse", metrics=lambda: [])
    tokens = np.array([[1, 9_000, 1], [7, 7, 7]], "int32")
    built.fit(np.tile(tokens, (10, 1)), np.ones(20), batch_size=2, shuffle=False, verbose=0)
    counts = strategy.worker_stats
    steps = sum(count.steps for count in counts)
    return {
        "pushed": sum(count.bytes_pushed for count in counts) / steps,
        "pulled": sum(count.bytes_pulled for count in counts) / steps,
        "shapes": [list(variable.shape) for variable in built.layers[0].trainable_variables],
        "servers": sorted(variable.value.device for variable in built.layers[0].trainable_variables),
    }


@case
def saved(folder: Path) -> Outcome:
    """Saves what a process without a cluster loads: a model with a split table, and the optimizer's state."""
    strategy = ParameterServerStrategy(variable_partitioner=TWO_PARTS, mode=Synchronous())

    def tokens_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(31, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])

    tokens = np.arange(60).reshape(20, 3) % 31
    model = compiled(strategy, lambda: keras.optimizers.SGD(0.1), tokens_model, loss="mse", metrics=lambda: [])
    model.fit(tokens, np.ones(20), batch_size=5, verbose=0)
    model.save(folder / "table.keras")
    table = model.predict(tokens, verbose=0)
    plain = compiled(strategy, lambda: keras.optimizers.Adam(0.05), metrics=lambda: ["accuracy"])
    plain.fit(INPUTS, LABELS, batch_size=50, epochs=2, verbose=0)
    plain.save(folder / "model.keras")
    checkpoint = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer)
    options = tf.train.CheckpointOptions(experimental_io_device="/job:chief/device:CPU:0")
    prefix = checkpoint.write(str(folder / "checkpoint"), options)
    with strategy.scope():
        loaded = keras.models.load_model(folder / "table.keras")
    loaded.fit(tokens, np.ones(20), batch_size=5, verbose=0)
    model.fit(tokens, np.ones(20), batch_size=5, verbose=0)
    return {
        "tokens": tokens,
        "table": table,
        "outputs": plain.predict(INPUTS, verbose=0),
        "evaluation": plain.evaluate(INPUTS, LABELS, verbose=0),
        "momenta": [variable.numpy().tolist() for variable in plain.optimizer.variables],
        "prefix": prefix,
        "after_loading": largest_difference(loaded.predict(tokens, verbose=0), model.predict(tokens, verbose=0)),
    }


def _own_loop(strategy: Any) -> Outcome:
    """A custom loop as in TensorFlow: functions that are scheduled one after another."""
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
        optimizer.build(model.trainable_variables)

    def replica_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(labels, model(inputs), from_logits=True)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(inputs, labels))

    losses = []
    for start in range(0, 200, 20):
        batch = tf.constant(INPUTS[start : start + 20]), tf.constant(LABELS[start : start + 20])
        if isinstance(strategy, ParameterServerStrategy):
            value = strategy.coordinator.schedule(step, args=batch)
            strategy.coordinator.join()
            losses.append(float(value.fetch()))
        else:
            losses.append(float(step(*batch)))
    return {"weights": model.get_weights(), "losses": losses, "updates": int(optimizer.iterations.numpy())}


compared("own_loop", ParameterServerStrategy, _own_loop)
