"""Cases about `add_loss`: means, sums, values for each sample, results of Keras' losses."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import INPUTS, LABELS, SAMPLES, Outcome, case, classifier, cross_entropy, dataset, fitted

SGD = keras.optimizers.SGD
WEIGHTS = np.linspace(0.1, 2.0, SAMPLES).astype("float32")


class AddsLosses(keras.layers.Layer):
    """Adds every kind of loss that a layer can compute from its inputs."""

    def __init__(self) -> None:
        super().__init__(activity_regularizer=keras.regularizers.L2(0.02))
        self.mean_squared = keras.losses.MeanSquaredError()
        self.summed = keras.losses.MeanSquaredError(reduction="sum")

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs: Any) -> Any:
        ops = keras.ops
        self.add_loss(0.1 * ops.mean(inputs**2))
        self.add_loss(0.01 * ops.sum(ops.abs(inputs)))
        self.add_loss(0.02 * ops.mean(inputs**2, axis=-1))  # one for each sample
        self.add_loss(0.03 * ops.mean(inputs, axis=0) ** 1)  # one for each feature
        self.add_loss(0.1 * ops.square(self.scale))
        self.add_loss(0.5 * self.mean_squared(ops.zeros_like(inputs), inputs) + 0.2 * ops.mean(inputs))
        self.add_loss(0.01 * self.summed(ops.zeros_like(inputs), inputs))
        return inputs * self.scale


def _with_added_losses() -> keras.Model:
    # 16 features, and 16 samples in a batch: the number alone does not tell an axis of features from one of samples.
    return classifier(lambda: [keras.layers.Dense(16, activation="relu"), AddsLosses()])


@case()
def added_losses(strategy: tf.distribute.Strategy) -> Outcome:
    """In batches whose size is known only while they are computed, the last one of one sample."""
    return fitted(strategy, lambda: SGD(0.1), model=_with_added_losses, data=dataset(21))


@case()
def added_losses_of_static_batches(strategy: tf.distribute.Strategy) -> Outcome:
    data = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(32, drop_remainder=True)
    return fitted(strategy, lambda: SGD(0.1), model=_with_added_losses, data=data)


class Endpoint(keras.layers.Layer):
    """Computes the loss of the model from its inputs, logits and labels, as an endpoint layer does."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss_of = loss

    def call(self, logits: Any, labels: Any, weights: Any) -> Any:
        self.add_loss(self.loss_of(labels, logits, weights))
        return keras.ops.softmax(logits)


def _endpoint(loss: Any) -> keras.Model:
    inputs, labels, weights = keras.Input((10,)), keras.Input((), dtype="int64"), keras.Input(())
    return keras.Model((inputs, labels, weights), Endpoint(loss)(classifier()(inputs), labels, weights))


@case()
def endpoint_layers(strategy: tf.distribute.Strategy) -> Outcome:
    """Losses of Keras as objects and as a function of the samples, as in keras.io's example of CTC."""

    def of_samples(labels: Any, logits: Any, weights: Any) -> Any:
        return 0.1 * keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True) * weights

    losses = {"object": cross_entropy(), "weighted": cross_entropy(reduction="mean_with_sample_weight")}
    data = dataset(21, (INPUTS, LABELS, WEIGHTS))
    arguments = {"data": data, "loss": lambda: None, "metrics": lambda: None, "epochs": 1}
    return {
        name: fitted(strategy, lambda: SGD(0.1), model=lambda loss=loss: _endpoint(loss), **arguments)
        for name, loss in {**losses, "samples": of_samples}.items()
    }


class LogsAfterTheUpdate(keras.Model):
    """Logs the losses of its layers after the update, in which the replicas meet."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _with_added_losses()
        self.added = keras.metrics.Mean(name="added")

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(cross_entropy(reduction="none")(y, self.network(x))) + sum(self.network.losses[:1])
        variables = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.added.update_state(sum(self.network.losses[:1]))
        return {"added": self.added.result()}


@case()
def added_losses_read_after_the_update(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: SGD(0.1), model=LogsAfterTheUpdate, metrics=lambda: None, loss=lambda: None)


class Alignments(keras.layers.Layer):
    """Adds the CTC loss of each sample, in a column, as an endpoint layer of a recognizer does."""

    def call(self, inputs: Any, labels: Any) -> Any:
        logits = tf.transpose(tf.reshape(inputs, [-1, 4, 4]), [1, 0, 2])
        sparse = tf.sparse.from_dense(labels[:, None] % 3 + 1)
        lengths = tf.fill([tf.shape(inputs)[0]], 4)
        losses = tf.compat.v1.nn.ctc_loss(tf.cast(sparse, tf.int32), logits, lengths)
        self.add_loss(0.01 * losses[:, None])
        return inputs


@case()
def alignment_losses(strategy: tf.distribute.Strategy) -> Outcome:
    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        inputs, labels = keras.Input((INPUTS.shape[1],)), keras.Input((), dtype="int64")
        return keras.Model([inputs, labels], Alignments()(keras.layers.Dense(16)(inputs), labels))

    # TensorFlow's CTC loss rejects a batch without rows, so that four replicas have one each of the last batch.
    data = tf.data.Dataset.from_tensor_slices(((INPUTS, LABELS),)).batch(20)
    return fitted(strategy, lambda: SGD(0.1), model=model, loss=lambda: None, metrics=lambda: None, data=data)
