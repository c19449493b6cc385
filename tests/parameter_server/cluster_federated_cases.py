"""Cases of `FederatedAveraging` on the cluster, against NumPy and one process."""

import contextlib
import unittest.mock

import keras
import numpy as np
import tensorflow as tf
from cluster_cases import FEATURES, INPUTS, LABELS, case
from federated_reference import Adam, Sgd, train

from tfdist.parameter_server import federated_chief
from tfdist.parameter_server.modes import chosen_clients
from tfdist.strategies import FederatedAveraging, ParameterServerStrategy

CLIENTS, BATCH = 5, 8
# By client, unequal numbers of samples: 16, 24, 32, 40, 48 in batches of 8; client 4 has batches of 12.
_ENDS = np.cumsum([16, 24, 32, 40, 48])
SIZES = [BATCH] * 4 + [12]


def batches_of(client):
    start, end, size = ([0, *_ENDS])[client], _ENDS[client], SIZES[client]
    return [(INPUTS[at : at + size], LABELS[at : at + size]) for at in range(start, end, size)]


def dataset_fn(context):
    client = context.input_pipeline_id
    assert context.num_input_pipelines == CLIENTS
    start, end = ([0, *_ENDS])[client], _ENDS[client]
    data = tf.data.Dataset.from_tensor_slices((INPUTS[start:end], LABELS[start:end]))
    return data.batch(SIZES[client])


def regression(strategy, optimizer, **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3, bias_initializer="normal")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], **arguments)
    return model


def fit(strategy, model, rounds, **arguments):
    data = strategy.distribute_datasets_from_function(dataset_fn)
    return model.fit(data, steps_per_epoch=rounds, verbose=0, **arguments).history


def difference(model, expected):
    pairs = zip(model.get_weights(), expected, strict=True)
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)


def against_numpy(mode, server, rounds, **reference):
    strategy = ParameterServerStrategy(mode=mode)
    model = regression(strategy, lambda: keras.optimizers.SGD(0.5))
    initial = model.get_weights()
    logs = fit(strategy, model, 1, epochs=rounds)
    chosen = [
        chosen_clients(mode.seed, number, CLIENTS, range(CLIENTS), mode.num_chosen(2)) for number in range(rounds)
    ]
    data = [batches_of(client) for client in range(CLIENTS)]
    expected, losses = train(initial, data, chosen, server, local_steps=mode.local_steps, rate=0.5, **reference)
    stats = strategy.worker_stats
    return {
        "difference": difference(model, expected),
        "loss": float(np.abs(np.subtract(logs["loss"], losses)).max()),
        "updates": int(model.optimizer.iterations.numpy()),
        "samples": [sum(SIZES[one] * mode.local_steps for one in of_round) for of_round in chosen],
        "counted": sum(worker.samples for worker in stats),
        "moved": float(np.abs(initial[0] - expected[0]).max()),
    }


@case
def federated_averaging(_):
    """All clients; the clients' batches are of two sizes."""
    return against_numpy(FederatedAveraging(local_steps=3, clients=CLIENTS), Sgd(1.0), rounds=4)


@case
def federated_adam_of_some_clients(_):
    mode = FederatedAveraging(
        local_steps=2,
        clients=CLIENTS,
        clients_per_round=3,
        server_optimizer=keras.optimizers.Adam(0.1),
        proximal=0.5,
        clip_difference=0.3,
        seed=4,
    )
    return against_numpy(mode, Adam(0.1), rounds=6, proximal=0.5, clip=0.3)


@case
def federated_single_steps_are_one_process(_):
    """One local step of plain SGD by all clients: a step of one process on all of their batches."""
    strategy = ParameterServerStrategy(mode=FederatedAveraging(local_steps=1, clients=CLIENTS))
    model = regression(strategy, lambda: keras.optimizers.SGD(0.5))
    alone = regression(tf.distribute.get_strategy(), lambda: keras.optimizers.SGD(0.5))
    history = fit(strategy, model, 1, epochs=5)
    losses = []
    for number in range(5):
        batches = [batches_of(client) for client in range(CLIENTS)]
        parts = [of_client[number % len(of_client)] for of_client in batches]
        inputs, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        losses.append(float(alone.train_on_batch(inputs, labels)[0]))
        alone.reset_metrics()
    evaluation = model.evaluate(INPUTS, LABELS, verbose=0)
    return {
        "difference": difference(model, alone.get_weights()),
        "loss": float(np.abs(np.subtract(history["loss"], losses)).max()),
        "evaluation": float(np.abs(np.subtract(evaluation, alone.evaluate(INPUTS, LABELS, verbose=0))).max()),
        "prediction": float(np.abs(model.predict(INPUTS, verbose=0) - alone.predict(INPUTS, verbose=0)).max()),
    }


@case
def federated_with_everything(_):
    """Batch normalization, dropout, an embedding, Adam with a schedule and clipnorm, weights, int8, bfloat16 pulls."""
    mode = FederatedAveraging(local_steps=4, clients=3, server_optimizer=keras.optimizers.SGD(1.0, momentum=0.5))
    strategy = ParameterServerStrategy(mode=mode, compression="int8", pull_dtype="bfloat16")
    tokens = np.random.default_rng(3).integers(0, 20, size=(96, 4))
    labels = (tokens.sum(1) % 2).astype("int64")

    def of_client(context):
        start = context.input_pipeline_id * 32
        end = start + 32
        weights = np.ones([32], "float32")
        data = tf.data.Dataset.from_tensor_slices((tokens[start:end], labels[start:end], weights))
        return data.shuffle(32, seed=5).batch(16, drop_remainder=True)

    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = keras.layers
        stack = [layers.Embedding(20, 8), layers.Flatten(), layers.Dense(64, "relu"), layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *stack, layers.Dropout(0.2), layers.Dense(2)])
        rate = keras.optimizers.schedules.ExponentialDecay(0.03, 20, 0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate, clipnorm=1.0), loss, metrics=["accuracy"], steps_per_execution=2)
    before = strategy.communication
    data = strategy.distribute_datasets_from_function(of_client)
    history = model.fit(data, steps_per_epoch=20, epochs=2, validation_data=(tokens, labels), verbose=0).history
    sent = strategy.communication - before
    kernel, statistics = model.layers[2].kernel.numpy(), model.layers[3].moving_mean.numpy()
    return {
        "loss": history["loss"],
        "validation": history["val_accuracy"],
        "rounds": int(model.optimizer.iterations.numpy()),
        "updates": sent.updates,
        "pushes": sent.gradient_collectives,
        "bytes_of_a_push": sent.gradient_bytes / sent.gradient_collectives,
        "dense_bytes": 4 * sum(int(np.prod(one.shape)) for one in model.trainable_variables),
        "statistics_moved": float(np.abs(statistics).max()),
        "slots": float(sum(np.abs(one.numpy()).sum() for one in model.optimizer.variables[2:])),
        "finite": bool(np.isfinite(kernel).all()),
    }


class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.other = keras.optimizers.SGD(0.1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        logs = super().train_step(data)
        self.other.apply([tf.ones_like(one) for one in self.trainable_variables], self.trainable_variables)
        return logs


@case
def federated_errors(_):
    """What cannot be trained by clients."""
    strategy = ParameterServerStrategy(mode=FederatedAveraging(local_steps=1, clients=CLIENTS))
    other = ParameterServerStrategy(mode=FederatedAveraging(local_steps=1, clients=2))

    def empty(context):
        return tf.data.Dataset.from_tensor_slices((INPUTS[:16], LABELS[:16])).skip(16 * context.input_pipeline_id)

    def unequal(context):
        return tf.data.Dataset.from_tensor_slices(INPUTS if context.input_pipeline_id else LABELS)

    def sgd(**arguments):
        return lambda: keras.optimizers.SGD(0.5, **arguments)

    def two_optimizers():
        with strategy.scope():
            model = TwoOptimizers()
            model.build((None, FEATURES))
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return fit(strategy, model, 1)

    def half():
        with strategy.scope():
            model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3, dtype="mixed_float16")])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss)
        return fit(strategy, model, 1)

    def of_two_clients(context):
        return tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(8)

    def in_two_datasets(of_client):
        model = regression(other, sgd())
        data = other.distribute_datasets_from_function(lambda context: of_client(context))
        return model.fit(data, steps_per_epoch=1, verbose=0)

    tries = {
        "arrays": lambda: regression(strategy, sgd()).train_on_batch(INPUTS[:8], LABELS[:8]),
        "another": lambda: regression(strategy, sgd()).fit(
            other.distribute_datasets_from_function(of_two_clients), steps_per_epoch=1, verbose=0
        ),
        "empty": lambda: in_two_datasets(lambda context: empty(context).batch(8)),
        "unequal": lambda: in_two_datasets(unequal),
        "ema": lambda: fit(strategy, regression(strategy, sgd(use_ema=True)), 1),
        "accumulation": lambda: fit(strategy, regression(strategy, sgd(gradient_accumulation_steps=2)), 1),
        "xla": lambda: fit(strategy, regression(strategy, sgd(), jit_compile=True), 1),
        "half": half,
        "two optimizers": two_optimizers,
        "nan": lambda: fit(strategy, regression(strategy, lambda: keras.optimizers.SGD(1e39)), 5),
        "validation": lambda: fit(
            strategy,
            regression(strategy, sgd()),
            1,
            validation_data=strategy.distribute_datasets_from_function(dataset_fn),
            validation_steps=1,
        ),
        "loop": lambda: strategy.coordinator.create_per_worker_dataset(
            strategy.distribute_datasets_from_function(dataset_fn)
        ),
    }
    messages = {}
    for name, attempt in tries.items():
        try:
            attempt()
            messages[name] = "none"
        except (ValueError, RuntimeError) as error:
            messages[name] = str(error)
    model = regression(strategy, sgd())  # the strategy still works, and a model whose first `fit` was interrupted
    with unittest.mock.patch.object(federated_chief, "InitialSlots", side_effect=KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            fit(strategy, model, 1)
    messages["loss afterwards"] = fit(strategy, model, 3)["loss"][0]
    return messages
