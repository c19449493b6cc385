"""Cases about losses: weights, reductions, masks, regularizers."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import CLASSES, INPUTS, LABELS, SAMPLES, Outcome, case, classifier, cross_entropy, dataset, fitted

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
WEIGHTS = np.linspace(0.1, 2.0, SAMPLES).astype("float32")


@case()
def sample_weights(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(
        strategy, lambda: Adam(0.01), data=dataset(23, INPUTS, LABELS, WEIGHTS), weighted_metrics=["accuracy"]
    )


@case()
def class_weights(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01), fit={"class_weight": {0: 0.5, 1: 1.0, 2: 2.0, 3: 3.0}})


@case()
def mean_with_sample_weight(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(
        strategy,
        lambda: Adam(0.01),
        data=dataset(23, INPUTS, LABELS, WEIGHTS),
        loss=lambda: cross_entropy(reduction="mean_with_sample_weight"),
    )


@case()
def sum_reduction(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: SGD(0.01), data=dataset(23), loss=lambda: cross_entropy(reduction="sum"))


@case()
def loss_function_that_averages(strategy: tf.distribute.Strategy) -> Outcome:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))

    return fitted(strategy, lambda: SGD(0.1), data=dataset(21), loss=lambda: loss)


@case()
def loss_function_that_averages_with_weights(strategy: tf.distribute.Strategy) -> Outcome:
    """Keras multiplies the mean with the weights of all samples."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))

    return fitted(strategy, lambda: SGD(0.1), data=dataset(21, INPUTS, LABELS, WEIGHTS), loss=lambda: loss)


@case()
def regularizers(strategy: tf.distribute.Strategy) -> Outcome:
    def model() -> keras.Model:
        penalty = keras.regularizers.L1L2(0.01, 0.02)
        return classifier(lambda: [keras.layers.Dense(16, activation="relu", kernel_regularizer=penalty)])

    return fitted(strategy, lambda: SGD(0.1, momentum=0.9), model=model, data=dataset(23))


@case()
def constraints(strategy: tf.distribute.Strategy) -> Outcome:
    def model() -> keras.Model:
        return classifier(lambda: [keras.layers.Dense(16, kernel_constraint=keras.constraints.MaxNorm(0.5))])

    return fitted(strategy, lambda: SGD(0.1), model=model)


def _masked_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(12, 5, mask_zero=True)(tokens)
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(embedded))


@case()
def masked_sequences(strategy: tf.distribute.Strategy) -> Outcome:
    random = np.random.default_rng(1)
    lengths = random.integers(1, 7, size=SAMPLES)
    tokens = random.integers(1, 12, size=(SAMPLES, 6)) * (np.arange(6) < lengths[:, np.newaxis])
    labels = random.integers(0, CLASSES, size=(SAMPLES, 6))
    outcome = fitted(
        strategy, lambda: SGD(0.1), model=_masked_model, data=dataset(21, tokens.astype("int32"), labels), epochs=1
    )
    return outcome
