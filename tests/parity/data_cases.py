"""Cases about data and losses: partial batches, weights, masks, structures, uneven workers."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import (
    CLASSES,
    FEATURES,
    INPUTS,
    LABELS,
    SAMPLES,
    TARGETS,
    Outcome,
    case,
    classifier,
    cross_entropy,
    dataset,
    fitted,
)

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
WEIGHTS = np.linspace(0.1, 2.0, SAMPLES).astype("float32")


@case()
def last_partial_batch(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01), data=dataset(23))


@case()
def last_batch_of_one_sample(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01), data=dataset(21))


@case()
def everything_on_arrays(strategy: tf.distribute.Strategy) -> Outcome:
    """`fit` with validation, `evaluate` and `predict` on shuffled NumPy arrays that do not divide evenly."""
    with strategy.scope():
        model = classifier()
        model.compile(Adam(0.01), loss=cross_entropy(), metrics=["accuracy"])
    history = model.fit(INPUTS, LABELS, batch_size=23, epochs=2, validation_split=0.3, verbose=0)
    evaluation = model.evaluate(INPUTS, LABELS, batch_size=23, verbose=0, return_dict=True)
    prediction = model.predict(INPUTS, batch_size=23, verbose=0)
    single = [model.predict_on_batch(INPUTS[:count]) for count in (1, 5)]
    return {
        "weights": model.get_weights(),
        "logs": history.history,
        "evaluation": evaluation,
        "prediction": prediction,
        "single": single,
    }


def _convolutional() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Reshape((5, 2, 1)),
            layers.Conv2D(4, 3, padding="same", activation="gelu"),
            layers.BatchNormalization(trainable=False),
            layers.AveragePooling2D((5, 2)),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


@case()
def convolutions_without_samples(strategy: tf.distribute.Strategy) -> Outcome:
    """A last batch of one sample leaves replicas without any, in training, evaluation and prediction."""
    with strategy.scope():
        model = _convolutional()
        model.compile(Adam(0.01), loss=cross_entropy(), metrics=["accuracy"])
    data = dataset(21)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0)
    return {
        "weights": model.get_weights(),
        "logs": history.history,
        "evaluation": model.evaluate(data, verbose=0, return_dict=True),
        "prediction": model.predict(data, verbose=0),
    }


@case()
def seeded_shuffle_and_cache(strategy: tf.distribute.Strategy) -> Outcome:
    """The samples have the order of one process, shuffled again in each epoch, and a cache holds them all."""
    with strategy.scope():
        model = classifier()
        model.compile(Adam(0.01), loss=cross_entropy(), metrics=["accuracy"])
    shuffled = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).shuffle(SAMPLES, seed=3).batch(16)
    cached = dataset(16).cache()
    history = model.fit(shuffled, epochs=3, validation_data=cached, verbose=0)
    evaluations = [model.evaluate(cached, verbose=0, return_dict=True) for _ in range(3)]
    return {"weights": model.get_weights(), "logs": history.history, "evaluations": evaluations}


@case()
def texts(strategy: tf.distribute.Strategy) -> Outcome:
    """Strings, which have no mean, in a first batch that is not even."""
    words = np.array(["red", "green", "blue"])[np.arange(7) % 3]
    with strategy.scope():
        keras.utils.set_random_seed(0)
        vectorize = keras.layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
        inputs = keras.Input((1,), dtype="string")
        model = keras.Model(inputs, keras.layers.Dense(1)(vectorize(inputs)))
        model.compile(SGD(0.1), loss="mse")
    data = dataset(64, words[:, np.newaxis], np.arange(7, dtype="float32"))
    history = model.fit(data, epochs=2, verbose=0)
    return {"weights": model.get_weights(), "logs": history.history}


def _inputs(columns: Any, rows: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((tuple(column[:rows] for column in columns),))


@case()
def lookups_without_samples(strategy: tf.distribute.Strategy) -> Outcome:
    """Lookups that accept no unknown word or number, in batches that leave replicas without samples."""
    words, numbers = np.array(["red", "green", "blue"])[np.arange(7) % 3], 5 + np.arange(7) % 2
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        lookups = [
            layers.StringLookup(vocabulary=["red", "green", "blue"], num_oov_indices=0, output_mode="one_hot"),
            layers.IntegerLookup(vocabulary=[5, 6], num_oov_indices=0, output_mode="one_hot"),
        ]
        inputs = [keras.Input((1,), dtype="string"), keras.Input((1,), dtype="int64")]
        found = [lookup(part) for lookup, part in zip(lookups, inputs, strict=True)]
        model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(found)))
        model.compile(SGD(0.1), loss="mse")
    columns = (words[:, np.newaxis], numbers[:, np.newaxis])
    data = dataset(6, columns, np.arange(7, dtype="float32"))
    history = model.fit(data, epochs=2, verbose=0)
    return {
        "weights": model.get_weights(),
        "logs": history.history,
        "evaluation": model.evaluate(data, verbose=0, return_dict=True),
        "predictions": [model.predict(_inputs(columns, rows), verbose=0) for rows in (1, 7)],
    }


@case()
def on_batch_methods(strategy: tf.distribute.Strategy) -> Outcome:
    """`train_on_batch` and `test_on_batch`, also of fewer samples than replicas."""
    with strategy.scope():
        model = classifier()
        model.compile(Adam(0.01), loss=cross_entropy(), metrics=["accuracy"])
    sizes = (16, 5, 1)
    trained = [model.train_on_batch(INPUTS[:size], LABELS[:size]) for size in sizes]
    tested = [model.test_on_batch(INPUTS[:size], LABELS[:size], WEIGHTS[:size]) for size in sizes]
    return {"weights": model.get_weights(), "trained": trained, "tested": tested}


def _two_headed() -> keras.Model:
    keras.utils.set_random_seed(0)
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((FEATURES,), name="right")
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Concatenate()([left, right]))
    return keras.Model(
        {"left": left, "right": right},
        {
            "kind": keras.layers.Dense(CLASSES, name="kind")(hidden),
            "size": keras.layers.Dense(1, name="size")(hidden),
        },
    )


@case(reference_is_traced=True)  # eagerly, Keras weights logs of several outputs by the sizes of batches
def many_inputs_and_outputs(strategy: tf.distribute.Strategy) -> Outcome:
    data = tf.data.Dataset.from_tensor_slices(
        ({"left": INPUTS, "right": -INPUTS}, {"kind": LABELS, "size": TARGETS}, {"kind": WEIGHTS, "size": WEIGHTS})
    ).batch(23)
    return fitted(
        strategy,
        lambda: Adam(0.01),
        model=_two_headed,
        data=data,
        loss=lambda: {"kind": cross_entropy(), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics=lambda: {"kind": ["accuracy"], "size": ["mae"]},
    )


class _DenseEmbedding(keras.layers.Layer):
    """An embedding whose gradient is dense: what the sparse one must add up to."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self._rows, self._columns = rows, columns

    def build(self, input_shape: Any) -> None:
        self.table = self.add_weight(shape=(self._rows, self._columns), initializer="uniform")

    def call(self, tokens: Any) -> Any:
        return keras.ops.one_hot(tokens, self._rows) @ self.table


def _tokens_model(embedding: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    pooled = keras.layers.GlobalAveragePooling1D()(embedding(12, 5)(tokens))
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(pooled))


def _embedded(strategy: tf.distribute.Strategy, embedding: Any, **optimizer: Any) -> Outcome:
    tokens = np.random.default_rng(2).integers(0, 12, size=(SAMPLES, 6)).astype("int32")
    return fitted(
        strategy,
        lambda: Adam(0.01, **optimizer),
        model=lambda: _tokens_model(embedding),
        data=dataset(23, tokens, LABELS),
    )


@case(lambda strategy: _embedded(strategy, _DenseEmbedding, global_clipnorm=0.1))
def embedding_with_global_clipnorm(strategy: tf.distribute.Strategy) -> Outcome:
    return _embedded(strategy, keras.layers.Embedding, global_clipnorm=0.1)


@case(lambda strategy: _embedded(strategy, _DenseEmbedding, clipvalue=0.001))
def embedding_with_clipvalue(strategy: tf.distribute.Strategy) -> Outcome:
    return _embedded(strategy, keras.layers.Embedding, clipvalue=0.001)


@case(lambda strategy: _embedded(strategy, _DenseEmbedding, gradient_accumulation_steps=3))
def embedding_with_accumulation(strategy: tf.distribute.Strategy) -> Outcome:
    return _embedded(strategy, keras.layers.Embedding, gradient_accumulation_steps=3)


def _interleaved(first: np.ndarray, second: np.ndarray, size: int) -> np.ndarray:
    """The two arrays' batches of `size` in turn."""
    batches = [part.reshape(-1, size, *part.shape[1:]) for part in (first, second)]
    return np.stack(batches, axis=1).reshape(-1, *first.shape[1:])


def fitted_on_uneven_workers(
    strategy: tf.distribute.Strategy, as_drawn: Callable[[tf.data.Dataset], Any] = lambda own: own, **more: Any
) -> Outcome:
    """Worker 0 has five batches of 8, worker 1 three; one process has the five, three of them with both parts.

    Args:
      strategy: workers, or one process.
      as_drawn: takes a worker's batches, returns those that it draws.
      **more: arguments of `fitted`.
    """
    columns = more.pop("columns", (INPUTS, LABELS))
    parts = [(column[:40], column[40:]) for column in columns]
    if strategy.num_replicas_in_sync == 1:
        of_both = dataset(16, *(_interleaved(first[:24], second, size=8) for first, second in parts))
        of_first = dataset(8, *(first[24:] for first, _ in parts))
        return fitted(strategy, lambda: Adam(0.01), data=of_both.concatenate(of_first), **more)
    rank = strategy.rank
    own = tf.data.Dataset.from_tensor_slices(tuple(part[rank] for part in parts)).batch(
        8 // (strategy.num_replicas_in_sync // strategy.num_workers)
    )
    drawn = as_drawn(own)
    return fitted(
        strategy, lambda: Adam(0.01), data=strategy.distribute_datasets_from_function(lambda _: drawn), **more
    )


@case(workers_only=True)
def uneven_workers_of_known_size(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted_on_uneven_workers(strategy)


@case(workers_only=True)
def uneven_workers_of_unknown_size(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted_on_uneven_workers(strategy, lambda own: own.filter(lambda *_: True))
