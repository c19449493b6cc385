"""What cannot run in stages is rejected with the reason and a remedy."""

from collections.abc import Callable
from typing import Any

import keras
import pipeline_runs as runs
import pytest
import tensorflow as tf
from pipeline_runs import layers, ops, strategy_of

from tfdist.pipeline.column_run import micro_batches_of

pytestmark = pytest.mark.usefixtures("cpus")


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return {"loss": 0.0}


class OwnLoss(keras.Model):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return ops.mean(ops.square(y_pred - y))


class OwnApply(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(gradient * 2, variable) for gradient, variable in grads_and_vars])


class TensorFlowCall(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return tf.raw_ops.Tanh(x=self.dense(x))


class OtherInTraining(TensorFlowCall):
    def call(self, x: Any, training: bool = False) -> Any:
        x = self.dense(x)
        return ops.multiply(x, 2.0) if training else ops.multiply(x, 3.0)


class UnknownVariable(layers.Layer):
    def build(self, input_shape: Any) -> None:
        self.factor = [[tf.Variable(1.0)]]

    def call(self, x: Any) -> Any:
        return x * self.factor[0][0]


class GlobalRandom(layers.Layer):
    def call(self, x: Any) -> Any:
        return x + keras.random.normal((1,))


class Rematerialized(layers.Layer):
    def call(self, x: Any) -> Any:
        factor = ops.mean(x, -1, keepdims=True)
        return keras.remat(lambda y: y * factor)(x)


class Counting(layers.Layer):
    def build(self, input_shape: Any) -> None:
        self.count = self.add_weight(shape=(), trainable=False)

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)
        return x


def chain(*added: Any, kind: type = keras.Model) -> keras.Model:
    inputs = x = keras.Input((12,))
    for layer in [*added, layers.Dense(8), layers.Dense(3)]:
        x = layer(x)
    return kind(inputs, x)


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | options)
    return model


def counting_in_two_stages() -> keras.Model:
    counting = Counting()
    inputs = keras.Input((12,))
    return compiled(keras.Model(inputs, layers.Dense(3)(counting(layers.Dense(12)(counting(inputs))))))


def regularized(kind: type) -> keras.Model:
    return compiled(chain(layers.Dense(4, kernel_regularizer="l2"), kind=kind))


CASES: list[tuple[Callable[[], keras.Model], str]] = [
    (lambda: compiled(chain(kind=OwnStep)), "its own train_step cannot be cut"),
    (lambda: regularized(OwnLoss), "its own compute_loss cannot have weight regularizers"),
    (
        lambda: compiled(chain(layers.Dense(4, activity_regularizer="l2"), kind=OwnLoss)),
        "its own compute_loss cannot have layers with losses",
    ),
    (lambda: compiled(chain(), optimizer=OwnApply()), "its own apply_gradients cannot update stages"),
    (lambda: compiled(chain(), run_eagerly=True), "Stages run in a compiled function"),
    (lambda: compiled(chain(), jit_compile=True), "XLA cannot compile a step"),
    (lambda: compiled(TensorFlowCall()), "it is not a graph of layers"),
    (lambda: compiled(OtherInTraining()), "does not compute the same in training and testing"),
    (lambda: compiled(chain(UnknownVariable())), "reads variables that Keras does not know"),
    (lambda: compiled(chain(GlobalRandom())), "assigns variables that do not belong to its layers"),
    (lambda: compiled(chain(Rematerialized())), "uses tensors that are not its arguments"),
    (lambda: compiled(chain(layers.BatchNormalization(synchronized=True))), "statistics of the complete batch"),
    (counting_in_two_stages, "Two stages change the same variable"),
    (lambda: compiled(chain(), loss=keras.losses.MeanSquaredError(reduction=None)), "is not a scalar"),
    (lambda: compiled(chain(), loss=None), "has no loss"),
    (
        lambda: compiled(chain(), loss=lambda y, p: ops.sum(ops.square(y - p)) / ops.sum(ops.abs(p))),
        "divides by a value that is not known before the predictions",
    ),
    (lambda: compiled(keras.Sequential([keras.Input((12,)), layers.Dense(3)])), "fewer layers than the pipeline"),
]


@pytest.mark.parametrize(("build", "message"), CASES, ids=[message for _, message in CASES])
@pytest.mark.filterwarnings("ignore:A loss is neither a mean nor a sum")
def test_model_is_rejected(build: Callable[[], keras.Model], message: str) -> None:
    with strategy_of(2).scope():
        model = build()
    with pytest.raises(ValueError) as error:
        model.fit(runs.X, runs.VALUES, batch_size=25, verbose=0)
    text = str(error.value).replace("`", "")
    assert message in text and "Received: " in text and "Expected: " in text


def test_an_optimizer_from_outside_is_rejected() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    with strategy_of(2).scope():
        model = compiled(chain(), optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer was created outside"):
        model.fit(runs.X, runs.VALUES, verbose=0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda: [tf.ragged.constant([[1.0], [2.0, 3.0]])], "cannot be split into micro-batches"),
        (lambda: [tf.ones((4, 1)), tf.ones(3)], "different numbers of samples"),
    ],
)
def test_batch_is_rejected(batch: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.* Received: .*Expected: "):
        micro_batches_of(batch(), 2)
