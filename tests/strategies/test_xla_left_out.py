"""`jit_compile=True`: calls of layers that XLA would change or does not know are computed without it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from xla_counts import TOLERANCE

from tfdist.strategies import MirroredStrategy

ROWS = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")


def unused_head():
    """Its weights have no gradient, so a decay of weights must leave them."""
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(6, activation="relu")(inputs)
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(hidden) for name in "ab"})
    return model, {"loss": {"a": "mse"}, "optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.1)}


def loss_of_two_kinds():
    def mean_and_sum(targets, outputs):
        squares = keras.ops.square(targets - outputs)
        return keras.ops.mean(squares) + 0.01 * keras.ops.sum(squares)

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), {"loss": mean_and_sum}


def recurrent_layer_that_adds_a_loss():
    layers = [keras.layers.Reshape((4, 2)), keras.layers.LSTM(4, activity_regularizer="l2"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *layers]), {"loss": "mse"}


class Condition(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return keras.ops.cond(keras.ops.sum(inputs) > 0, lambda: self.dense(inputs), lambda: -self.dense(inputs))


def condition():
    return keras.Sequential([keras.Input((8,)), Condition()]), {"loss": "mse"}


class Keeping(keras.layers.Layer):
    """Keeps a tensor of its call for a loss, as attention layers keep their scores."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        self.kept = {"scores": [self.dense(inputs)]}
        return self.kept["scores"][0] * 1.0


def tensor_in_an_attribute():
    layer = Keeping()

    def loss(targets, outputs):
        return keras.ops.square(targets - layer.kept["scores"][0])

    return keras.Sequential([keras.Input((8,)), layer]), {"loss": loss}


def normal_random_numbers():
    layers = [keras.layers.GaussianNoise(0.3, seed=1), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *layers]), {"loss": "mse"}


class ByPython(keras.layers.Layer):
    """Computes by operations that XLA does not know."""

    def call(self, inputs):
        numbers = tf.strings.to_number(tf.strings.as_string(inputs))
        return numbers + tf.ensure_shape(tf.numpy_function(lambda rows: 0 * rows, [inputs], tf.float32), inputs.shape)


def operations_unknown_to_xla():
    return keras.Sequential([keras.Input((8,)), ByPython(), keras.layers.Dense(1)]), {"loss": "mse"}


class StatefulRandomNumbers(keras.layers.Layer):
    def call(self, inputs):
        return tf.nn.dropout(inputs, 0.4, seed=3) + tf.random.normal(tf.shape(inputs), seed=5)


def stateful_random_numbers():
    tf.random.set_seed(4)
    return keras.Sequential([keras.Input((8,)), StatefulRandomNumbers(), keras.layers.Dense(1)]), {"loss": "mse"}


class StepOf(keras.Model):
    """A `train_step` with a loss of the user, `loss_of(dense, rows, targets)`."""

    def __init__(self, loss_of):
        super().__init__()
        self.loss_of = loss_of
        self.dense = keras.layers.Dense(1, activation="tanh")
        self.normal = keras.layers.BatchNormalization()
        self.net = keras.Sequential([keras.Input((8,)), self.dense, self.normal])

    def call(self, inputs):
        return self.net(inputs)

    def train_step(self, data):
        rows, targets = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, rows, targets)
        variables = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"own": loss}


def vectorized():
    def loss_of(model, rows, targets):
        return tf.reduce_mean((tf.vectorized_map(lambda row: model.dense(row[None])[0], rows) - targets) ** 2)

    return StepOf(loss_of), {}


def forward_accumulator():
    def loss_of(model, rows, targets):
        with tf.autodiff.ForwardAccumulator(rows, tf.ones_like(rows)) as accumulator:
            outputs = model.dense(rows)
        return tf.reduce_mean(accumulator.jvp(outputs) ** 2)

    return StepOf(loss_of), {}


def stateless():
    def loss_of(model, rows, targets):
        trained = [variable.value for variable in model.net.trainable_variables]
        others = [variable.value for variable in model.net.non_trainable_variables]
        outputs, _ = model.net.stateless_call(trained, others, rows, training=True)
        return tf.reduce_mean((outputs - targets) ** 2)

    return StepOf(loss_of), {}


@pytest.mark.parametrize(
    "program",
    [
        unused_head,
        recurrent_layer_that_adds_a_loss,
        tensor_in_an_attribute,
        operations_unknown_to_xla,
        stateful_random_numbers,
        pytest.param(normal_random_numbers, marks=pytest.mark.long),  # by a list, as the stateful ones
        pytest.param(loss_of_two_kinds, marks=pytest.mark.long),
        pytest.param(condition, marks=pytest.mark.long),
        pytest.param(vectorized, marks=pytest.mark.long),
        pytest.param(forward_accumulator, marks=pytest.mark.long),
        pytest.param(stateless, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:A loss is neither a mean", "ignore:Gradients do not exist")
def test_what_xla_would_change_is_left_out(cpus, program):
    """Each of these was wrong, or an error, when it was compiled."""
    targets = ROWS.sum(axis=1, keepdims=True)
    weights = []
    for jit_compile in (False, True):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with MirroredStrategy(cpus[:2]).scope():
            model, arguments = program()
            model.compile(**{"optimizer": keras.optimizers.SGD(0.05), **arguments}, jit_compile=jit_compile)
        model.fit(ROWS, {"a": targets} if program is unused_head else targets, batch_size=8, epochs=2, verbose=0)
        weights.append(model.get_weights())
    for found, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
