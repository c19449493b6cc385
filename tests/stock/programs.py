"""The programs of the table: each as a user would write it, with the strategies taken from the module it is given.

`strategies` is `tf.distribute`, `tfdist.strategies`, or `OneProcess`, which gives what the other two should equal.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import CLASSES, INPUTS, LABELS, Outcome, classifier, cross_entropy, dataset, fitted

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
DEVICES = ("CPU:0", "CPU:1")
on_progress: list[Callable[[], None]] = []


class OneProcess:
    """Stands for a module of strategies: all samples of a batch in one place."""

    MirroredStrategy = MultiWorkerMirroredStrategy = staticmethod(lambda *_, **__: tf.distribute.get_strategy())


def progress() -> None:
    """Tells the one who waits for this program that it has not stopped."""
    for tell in on_progress:
        tell()


def fit_on_workers(strategies: Any) -> Outcome:
    return fitted(strategies.MultiWorkerMirroredStrategy(), lambda: Adam(0.01))


def accumulation(strategies: Any) -> Outcome:
    """Four micro-steps, and one process with the four batches in one."""
    micro_steps, batch_size = (None, 16) if strategies is OneProcess else (4, 4)
    optimizer = lambda: Adam(0.01, gradient_accumulation_steps=micro_steps)  # noqa: E731
    outcome = fitted(strategies.MirroredStrategy(DEVICES), optimizer, data=dataset(batch_size))
    return {"weights": outcome["weights"]}


def accumulation_with_averages(strategies: Any) -> Outcome:
    """Eager, where stock Keras can accumulate under a strategy."""
    micro_steps, batch_size = (None, 16) if strategies is OneProcess else (4, 4)

    def optimizer() -> keras.optimizers.Optimizer:
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.02])
        return SGD(schedule, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=micro_steps)

    strategy = strategies.MirroredStrategy(DEVICES)
    outcome = fitted(strategy, optimizer, data=dataset(batch_size), epochs=1, run_eagerly=True)
    return {"weights": outcome["weights"]}


def global_clipnorm(strategies: Any) -> Outcome:
    return fitted(strategies.MirroredStrategy(DEVICES), lambda: SGD(0.5, momentum=0.9, global_clipnorm=0.2))


def _with_an_overflow() -> tf.data.Dataset:
    """Four batches, in the second of which one sample's gradient overflows: the second replica's."""
    inputs = INPUTS.copy()
    inputs[16 + 9, 0] = 1e37
    return dataset(16, inputs, LABELS)


def overflow_on_a_replica(strategies: Any) -> Outcome:
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(Adam(0.01))  # noqa: E731
    outcome = fitted(
        strategies.MirroredStrategy(DEVICES), optimizer, data=_with_an_overflow(), epochs=1, metrics=lambda: None
    )
    return {"weights": outcome["weights"]}


def overflow_on_a_worker(strategies: Any) -> Outcome:
    """A custom loop, since stock Keras cannot `fit` on workers."""
    strategy = strategies.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()
        optimizer = keras.optimizers.LossScaleOptimizer(Adam(0.01))
        optimizer.build(model.trainable_variables)

    def replica_step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = optimizer.scale_loss(tf.nn.compute_average_loss(losses, global_batch_size=16))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(lambda batch: strategy.run(replica_step, args=batch))
    for batch in strategy.experimental_distribute_dataset(_with_an_overflow()):
        step(batch)
        progress()
    return {"weights": model.get_weights()}


def steps_per_execution(strategies: Any) -> Outcome:
    return fitted(strategies.MirroredStrategy(DEVICES), lambda: Adam(0.01), steps_per_execution=4)


def two_strategies(strategies: Any) -> Outcome:
    """Two models of different sizes, each under a separate strategy, trained in turn."""
    networks = classifier, lambda: classifier(lambda: [keras.layers.Dense(8)])
    outcomes = [
        fitted(strategies.MirroredStrategy(DEVICES), lambda: Adam(0.01), model=model, epochs=1) for model in networks
    ]
    return {"models": outcomes}


def jit_compile(strategies: Any) -> Outcome:
    return fitted(strategies.MirroredStrategy(DEVICES), lambda: Adam(0.01), jit_compile=True)


def uneven_batches(strategies: Any) -> Outcome:
    """Batches that the replicas cannot share evenly, from the first one on."""
    return fitted(strategies.MirroredStrategy(DEVICES), lambda: Adam(0.01), data=dataset(23))


def last_partial_batch(strategies: Any) -> Outcome:
    """Three batches of 16, and 3 samples left: one replica has two of them, the other one."""
    data = dataset(16, INPUTS[:51], LABELS[:51])
    return fitted(strategies.MirroredStrategy(DEVICES), lambda: Adam(0.01), data=data)


def area_under_curve(strategies: Any) -> Outcome:
    """The logs of each batch for a metric that is not a mean over the samples."""
    seen: list[float] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["auc"]))
    with strategies.MirroredStrategy(DEVICES).scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((INPUTS.shape[1],)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile(SGD(0.01), loss="binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    model.fit(dataset(16, INPUTS, (LABELS > 1).astype("float32")[:, np.newaxis]), verbose=0, callbacks=[watch])
    return {"auc": seen}


def masked_sequences(strategies: Any) -> Outcome:
    """Sequences of one to six tokens: the replicas' batches hold unequal numbers of them."""
    random = np.random.default_rng(1)
    length = random.integers(1, 7, size=len(INPUTS))[:, np.newaxis]
    tokens = np.where(np.arange(6) < length, random.integers(1, 12, size=(len(INPUTS), 6)), 0).astype("int32")
    labels = random.integers(0, CLASSES, size=tokens.shape)

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        words = keras.Input((6,), dtype="int32")
        return keras.Model(words, keras.layers.Dense(CLASSES)(keras.layers.Embedding(12, 5, mask_zero=True)(words)))

    strategy = strategies.MirroredStrategy(DEVICES)
    return fitted(strategy, lambda: SGD(0.1), model=model, data=dataset(16, tokens, labels))


def loss_that_averages(strategies: Any) -> Outcome:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))

    return fitted(strategies.MirroredStrategy(DEVICES), lambda: SGD(0.1), loss=lambda: loss)


def seeded_shuffle(strategies: Any) -> Outcome:
    with strategies.MirroredStrategy(DEVICES).scope():
        model = classifier()
        model.compile(SGD(0.1), loss=cross_entropy())
    samples = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS))
    model.fit(samples.shuffle(len(INPUTS), seed=3).batch(16), epochs=2, verbose=0)
    return {"weights": model.get_weights()}


def convolution_without_samples(strategies: Any) -> Outcome:
    """The last batch holds one sample: one replica has none."""

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((INPUTS.shape[1],)),
                layers.Reshape((5, 2, 1)),
                layers.Conv2D(4, 3, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )

    data = dataset(16, INPUTS[:49], LABELS[:49])
    return fitted(strategies.MirroredStrategy(DEVICES), lambda: Adam(0.01), model=model, data=data, epochs=1)


def all_devices(strategies: Any) -> Outcome:
    workers = len(tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().job_tasks("worker"))
    devices = workers * len(DEVICES)
    strategy = strategies.MultiWorkerMirroredStrategy()
    used = devices if strategies is OneProcess else strategy.num_replicas_in_sync
    return {"replicas": used, "shown": f"{used} of {devices} devices work"}


def missing_peer(strategies: Any) -> Outcome:
    return {"replicas": strategies.MultiWorkerMirroredStrategy().num_replicas_in_sync}
