"""Models that share layers, and models whose layers change, train the same weights as in one process."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from pipeline_runs import difference, difference_of_columns, layers, ops, strategy_of

pytestmark = pytest.mark.usefixtures("cpus")
OPTIONS = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


def in_both(program: Callable[[], Any], *strategy: Any) -> tuple[Any, Any]:
    """Runs a program within the scope of a strategy and without one."""
    keras.utils.set_random_seed(1)
    with strategy_of(*strategy).scope():
        result = program()
    keras.utils.set_random_seed(1)
    return result, program()


@pytest.mark.parametrize("columns", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_part_of_a_model_is_used_between_its_trainings(columns: int) -> None:
    """Functions that were traced before another model was cut elsewhere still train the weights of all models."""

    def program() -> Any:
        inputs = keras.Input((12,))
        code = layers.Dense(4)(layers.Dense(16)(layers.Dense(32, "relu")(inputs)))
        autoencoder = keras.Model(inputs, layers.Dense(12)(layers.Dense(64)(layers.Dense(64, "relu")(code))))
        encoder = keras.Model(inputs, code)
        autoencoder.compile(keras.optimizers.Adam(1e-2), "mse")
        codes = []
        for _ in range(2):
            autoencoder.fit(runs.X, runs.X, **OPTIONS)
            codes.append(encoder.predict(runs.X, verbose=0))
        return autoencoder, codes

    (model, codes), (reference, expected) = in_both(program, 2, columns)
    np.testing.assert_allclose(codes, expected, atol=1e-5)
    assert difference(model.weights, reference.weights) <= 1e-6
    assert columns == 1 or difference_of_columns(model) == 0.0


def test_two_trainings_share_layers() -> None:
    """The discriminator of a GAN is trained by itself, and frozen behind the generator."""

    def program() -> Any:
        generator = keras.Sequential([keras.Input((4,)), layers.Dense(16, "relu"), layers.Dense(12)])
        dense = [layers.Dense(32, "relu"), layers.Dense(16, "relu"), layers.Dense(1, "sigmoid")]
        discriminator = keras.Sequential([keras.Input((12,)), *dense])
        discriminator.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy")
        discriminator.train_on_batch(runs.X, np.ones((50, 1)))  # Keras traces the step before the layers are frozen
        discriminator.trainable = False
        noise = keras.Input((4,))
        both = keras.Model(noise, discriminator(generator(noise)))
        both.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy")
        logs = []
        for step in range(2):
            z = runs.X[step * 16 : step * 16 + 16, :4]
            logs.append(discriminator.train_on_batch(generator.predict(z, verbose=0), np.zeros((16, 1))))
            logs.append(both.train_on_batch(z, np.ones((16, 1))))
        return [*generator.weights, *discriminator.weights], logs

    (weights, logs), (reference, expected) = in_both(program, 2)
    np.testing.assert_allclose(logs, expected, atol=1e-5)
    assert difference(weights, reference) <= 1e-6


def test_layers_get_other_variables() -> None:
    def program() -> Any:
        model = runs.mlp(3)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(runs.X, runs.VALUES, **OPTIONS)
        keras.utils.set_random_seed(2)
        model.layers[0].enable_lora(2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(runs.X, runs.VALUES, **OPTIONS)
        return model.weights

    weights, expected = in_both(program, 2)
    assert difference(weights, expected) <= 1e-6


def test_rows_that_a_training_loop_assigns_reach_all_columns() -> None:
    def program() -> Any:
        strategy = tf.distribute.get_strategy()
        ids = tf.constant(np.random.default_rng(0).integers(0, 7, (16, 6)), tf.int32)
        model = keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(9, 4), layers.Flatten()])
        model.add(layers.Dense(3))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(ids, runs.VALUES[:16], **OPTIONS)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(model(ids) - runs.VALUES[:16]))
            weights = model.trainable_variables
            model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        strategy.run(step)
        return model, model.predict(ids, verbose=0)

    (model, predictions), (_, expected) = in_both(program, 2, 2)
    assert difference_of_columns(model) == 0.0
    np.testing.assert_allclose(predictions, expected, atol=1e-6)


def test_a_function_that_keeps_earlier_weights_is_warned_of() -> None:
    with strategy_of(2).scope():
        model = runs.mlp()
    predict = tf.function(lambda x: model(x))
    predict(runs.X)
    with pytest.warns(UserWarning, match="keeps the earlier values of weights.* 6 such .*dense"):
        model.predict(runs.X, verbose=0)


class OwnGradient(keras.layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def scaled(x: tf.Tensor) -> Any:
            return 2 * x, lambda gradient: 2 * gradient

        return scaled(x)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


def test_a_layer_with_its_own_gradient_is_not_warned_of() -> None:
    """TensorFlow keeps the graph of such a layer in which Keras has computed shapes, with all that it captured."""
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((runs.X.shape[1],)), keras.layers.Dense(3), OwnGradient()])
        model.add(keras.layers.Dense(1))
        model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_on_batch(runs.X, np.zeros([len(runs.X), 1]))
