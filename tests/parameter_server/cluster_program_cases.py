"""Cases of programs that are written for TensorFlow's strategy: its tutorial's loop, its partitioner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cluster_cases import INPUTS, LABELS, Outcome, case, classifier, compared, compiled

from tfdist.strategies import ParameterServerStrategy, Synchronous

_TWO_SHARDS = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)


def _batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
    size = context.get_per_replica_batch_size(20)
    return tf.data.Dataset.from_tensor_slices((INPUTS[:200], LABELS[:200])).batch(size)


@case
def tutorial(_: Path) -> Outcome:
    """The loop of TensorFlow's parameter server tutorial, on finite data that repeats and on finite data."""
    strategy = ParameterServerStrategy()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.SGD(0.1)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        optimizer.build(model.trainable_variables)

    @tf.function
    def repeated() -> Any:
        return strategy.distribute_datasets_from_function(lambda context: _batches(context).repeat())

    @tf.function
    def step(iterator: Any) -> Any:
        def replica_step(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                outputs = model(inputs, training=True)
                losses = keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=20)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            accuracy.update_state(labels, outputs)
            return loss

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=next(iterator)), axis=None)

    @tf.function
    def rows(iterator: Any) -> Any:
        count = 0
        for inputs, _ in iterator:
            count += len(inputs)
        return count

    iterator = iter(coordinator.create_per_worker_dataset(repeated))
    losses = []
    for _ in range(40):
        losses.append(coordinator.schedule(step, args=(iterator,)))
        coordinator.join()  # two steps at once lose counts: Keras reads, adds and assigns
    finite = coordinator.create_per_worker_dataset(strategy.distribute_datasets_from_function(_batches))
    counted = [coordinator.schedule(rows, args=(iter(finite),)) for _ in range(4)]
    coordinator.join()
    return {
        "updates": int(optimizer.iterations.numpy()),
        "samples": float(accuracy.count.numpy()),
        "losses": [float(loss.fetch()) for loss in losses],
        "rows": sum(int(count.fetch()) for count in counted),
    }


@case
def loop_with_a_loss_scale(_: Path) -> Outcome:
    """A loop whose first steps overflow: updates are skipped, and the scale is halved each time."""

    def trained(strategy: Any, call: Callable[..., Any]) -> list[Any]:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=2.0**126)
            optimizer.build(model.trainable_variables)
        inputs = 10 * np.random.default_rng(0).normal(size=(8, 4)).astype("float32")

        @tf.function
        def step() -> Any:
            def replica_step() -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(inputs, training=True) ** 2)
                    scaled = optimizer.scale_loss(loss)
                optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
                return loss

            return strategy.run(replica_step)

        losses = [float(call(step)) for _ in range(8)]
        return [*losses, int(optimizer.iterations.numpy()), float(optimizer.dynamic_scale.numpy())]

    strategy = ParameterServerStrategy()
    with strategy.scope():
        accumulating, variable = keras.optimizers.SGD(gradient_accumulation_steps=2), keras.Variable([1.0])
        accumulating.build([variable])

    @tf.function
    def accumulate() -> None:
        strategy.run(lambda: accumulating.apply([tf.ones([1])], [variable]))

    try:
        strategy.coordinator.schedule(accumulate)
        message = ""
    except ValueError as error:
        message = str(error)
    return {
        "one process": trained(tf.distribute.get_strategy(), lambda step: step()),
        "servers": trained(strategy, lambda step: strategy.coordinator.schedule(step).fetch()),
        "message": message,
    }


@case
def partitioned_variables(_: Path) -> Outcome:
    """A plain variable is split over the servers; the variables of Keras are not."""
    values = np.arange(10.0, dtype="float32").reshape(5, 2)
    strategy = ParameterServerStrategy(variable_partitioner=_TWO_SHARDS)
    with strategy.scope():
        variable, scalar = tf.Variable(values), tf.Variable(1.0)
        model = compiled(strategy, lambda: keras.optimizers.SGD(0.1))
    model.fit(INPUTS[:20], LABELS[:20], verbose=0)
    created: list[Any] = []

    @tf.function
    def create() -> None:
        if not created:
            given = {"dtype": "float32", "shape": (5, 2)}
            created.append(tf.Variable(values))
            created.append(tf.Variable(lambda: tf.constant(values)))
            created.append(tf.Variable(lambda: tf.ones([5, 2]) * values, **given))
            created.append(tf.Variable(tf.constant(values)[:, 0] + 0.0))

    with strategy.scope():
        create()
    wrong = ParameterServerStrategy(variable_partitioner=lambda shape, dtype: [1, 2])
    try:
        with wrong.scope():
            tf.Variable(values)
        message = ""
    except ValueError as error:
        message = str(error)
    return {
        "created": [tf.convert_to_tensor(one) for one in created],
        "created_shards": [[shard.shape[0] for shard in one.variables] for one in created],
        "shards": [shard.shape.as_list() for shard in variable.variables],
        "servers": sorted(shard.device.partition("task:")[2][0] for shard in variable.variables),
        "is_equal": bool(np.array_equal(tf.convert_to_tensor(variable), values)),
        "scalar": float(scalar.numpy()),
        "rows": tf.nn.embedding_lookup(variable, [4, 0]).numpy().tolist(),
        "weights": [list(weight.shape) for weight in model.weights],
        "message": message,
    }


class _TwoTables(keras.layers.Layer):
    """Has no `build`, so Keras builds its tables by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = keras.layers.Embedding(11, 4), keras.layers.Embedding(3, 4)

    def call(self, tokens: Any) -> Any:
        return self.words(tokens) + self.positions(keras.ops.arange(3))


def _two_tables(strategy: Any) -> Outcome:
    def model() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [_TwoTables(), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])

    built = compiled(strategy, lambda: keras.optimizers.SGD(0.05), model, loss="mse", metrics=lambda: [])
    tokens = np.arange(60, dtype="int32").reshape(20, 3) % 11
    history = built.fit(tokens, tokens.sum(1) / 30, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return {"weights": built.get_weights(), "logs": history.history}


compared("tables_in_a_layer_without_build", lambda: ParameterServerStrategy(mode=Synchronous()), _two_tables)
