"""Cases about batches of a static size, which some layers need: each replica's batches keep theirs on any cluster."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import CLASSES, FEATURES, INPUTS, LABELS, Outcome, case, classifier, cross_entropy
from data_cases import fitted_on_uneven_workers

Adam = keras.optimizers.Adam


class _PairedRows(keras.layers.Layer):
    """Adds nothing, but must know how many rows there are."""

    def call(self, inputs: Any) -> Any:
        rows = inputs.shape[0]
        pairs = tf.reshape(inputs, [rows // 2, 2, inputs.shape[1]])
        return tf.reshape(pairs, [rows, inputs.shape[1]])


def _batches(size: int = 16) -> tf.data.Dataset:
    """The samples in full batches; the last samples are left out."""
    rows = (INPUTS[:60], LABELS[:60])
    return tf.data.Dataset.from_tensor_slices(rows).shuffle(60, seed=5).batch(size, drop_remainder=True)


def _of_unknown_number() -> tf.data.Dataset:
    return _batches().filter(lambda *_: True)


def _paired(strategy: tf.distribute.Strategy, micro_batches: int = 1, **arguments: Any) -> keras.Model:
    """A compiled model of batches of 16, of which each replica has its part."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        inputs = keras.Input(batch_shape=(16 // strategy.num_replicas_in_sync // micro_batches, FEATURES))
        hidden = keras.layers.Dense(16, activation="relu")(_PairedRows()(inputs))
        model = keras.Model(inputs, keras.layers.Dense(CLASSES)(_PairedRows()(hidden)))
        model.compile(Adam(0.01), loss=cross_entropy(), metrics=["accuracy"], **arguments)
    return model


def _in_all_methods(strategy: tf.distribute.Strategy, evaluated: Callable[[], tf.data.Dataset]) -> Outcome:
    model = _paired(strategy)
    history = model.fit(_batches(), epochs=2, validation_data=_batches(), verbose=0)
    several = _paired(strategy, steps_per_execution=2)
    arrays = _paired(strategy)
    return {
        "logs": [
            history.history,
            several.fit(_of_unknown_number(), epochs=2, verbose=0).history,
            arrays.fit(INPUTS, LABELS, batch_size=16, shuffle=False, verbose=0).history,
        ],
        "evaluations": [model.evaluate(data, verbose=0) for data in (_batches(), evaluated())],
        "prediction": model.predict(
            tf.data.Dataset.from_tensor_slices(INPUTS).batch(16, drop_remainder=True), verbose=0
        ),
        "weights": [*model.get_weights(), *several.get_weights(), *arrays.get_weights()],
    }


@case(lambda strategy: _in_all_methods(strategy, _batches), workers_only=True)
def static_sizes(strategy: tf.distribute.Strategy) -> Outcome:
    """A model with a `batch_shape` in all methods, several steps an execution, unknown numbers of batches, and arrays.

    TensorFlow keeps the sizes within one process, unless the number of batches is unknown. One process evaluates a
    known number of batches here: otherwise Keras counts the samples of a batch of a static size once more when it finds
    no further batch.
    """
    return _in_all_methods(strategy, _of_unknown_number)


@case()
def static_sizes_eagerly(strategy: tf.distribute.Strategy) -> Outcome:
    model = _paired(strategy, run_eagerly=True)
    history = model.fit(_batches(), verbose=0)
    return {"logs": history.history, "weights": model.get_weights()}


@case(workers_only=True)
def static_sizes_in_micro_batches(strategy: tf.distribute.Strategy) -> Outcome:
    if strategy.num_replicas_in_sync > 1:
        strategy = type(strategy)(micro_batches=2)
    model = _paired(strategy, micro_batches=strategy.micro_batches if strategy.num_replicas_in_sync > 1 else 1)
    history = model.fit(_batches(), epochs=2, verbose=0)
    return {"logs": history.history, "weights": model.get_weights()}


@case()
def stateful_layers(strategy: tf.distribute.Strategy) -> Outcome:
    """A recurrent layer that keeps a state for each row of a batch; row i continues row i of the batch before."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        inputs = keras.Input(batch_shape=(16 // strategy.num_replicas_in_sync, FEATURES))
        hidden = keras.layers.LSTM(6, stateful=True)(keras.layers.Reshape((5, 2))(inputs))
        model = keras.Model(inputs, keras.layers.Dense(CLASSES)(hidden))
        model.compile(Adam(0.01), loss=cross_entropy(), metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(16, drop_remainder=True)
    history = model.fit(data, epochs=2, verbose=0)
    return {
        "logs": history.history,
        "prediction": model.predict(data, verbose=0),
        "weights": [variable.numpy() for variable in model.trainable_variables],
    }


class _NeedsStaticRows(keras.layers.Layer):
    """Fails for a replica whose number of rows is not static. One process computes on batches of two sizes."""

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs: Any) -> Any:
        if tf.distribute.get_strategy().num_replicas_in_sync > 1 and inputs.shape[0] is None:
            raise ValueError("The number of rows is not static.")
        return inputs


@case(workers_only=True)
def uneven_workers_of_static_size(strategy: tf.distribute.Strategy) -> Outcome:
    """At the end a worker's replicas compute on as many rows as before, which count nothing, also in statistics."""
    outcomes = []
    for filters in (False, True):
        kept = (lambda own: own.filter(lambda *_: True)) if filters else (lambda own: own)
        full = lambda own, kept=kept: kept(own.unbatch().batch(_rows(strategy), drop_remainder=True))  # noqa: E731
        statistics = [keras.layers.BatchNormalization] if filters else []
        hidden = lambda statistics=statistics: [  # noqa: E731
            keras.layers.Dense(16, activation="relu"),
            *(layer(synchronized=True) for layer in statistics),
            _NeedsStaticRows(),
        ]
        outcomes.append(fitted_on_uneven_workers(strategy, full, model=lambda hidden=hidden: classifier(hidden)))
    return {
        "logs": [outcome["logs"] for outcome in outcomes],
        "weights": [weight for outcome in outcomes for weight in outcome["weights"]],
    }


def _rows(strategy: tf.distribute.Strategy) -> int:
    """How many rows a replica draws in a step."""
    return 8 * strategy.num_workers // strategy.num_replicas_in_sync


def _lookup() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((1,), dtype="int64")
    found = keras.layers.IntegerLookup(vocabulary=[5, 6], num_oov_indices=0, output_mode="one_hot")(inputs)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(found))


@case(workers_only=True)
def uneven_workers_of_static_size_and_lookups(strategy: tf.distribute.Strategy) -> Outcome:
    """Zeros are no known numbers: without samples, a replica does not compute on them."""
    return fitted_on_uneven_workers(
        strategy,
        lambda own: own.unbatch().batch(_rows(strategy), drop_remainder=True),
        model=_lookup,
        columns=(5 + np.arange(64)[:, np.newaxis] % 2, LABELS),
    )
