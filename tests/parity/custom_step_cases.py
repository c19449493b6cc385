"""Cases about a `train_step` with its own loss and its own logs, as Keras' guides and examples write them."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import FEATURES, INPUTS, LABELS, TARGETS, Outcome, case, classifier, cross_entropy, dataset, fitted

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
ops = keras.ops


class OwnStep(keras.Model):
    """A model whose `train_step` computes `loss_of(predicted, labels)` and logs it in five ways."""

    def __init__(self, loss_of: Any, network: Any = classifier) -> None:
        super().__init__()
        self.network, self.loss_of = network(), loss_of
        self.tracker = keras.metrics.Mean(name="tracked")
        self.total = keras.metrics.Sum(name="total")
        self.by_samples, self.twice = keras.metrics.Mean(name="by_samples"), keras.metrics.Sum(name="twice")

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.total, self.by_samples, self.twice]

    def _update_metrics(self, loss: Any, inputs: Any) -> dict[str, Any]:
        self.tracker.update_state(loss)
        self.total.update_state(loss)
        self.by_samples.update_state(loss, sample_weight=tf.shape(inputs)[0])
        self.twice.update_state(loss, sample_weight=2.0)
        return {"loss": loss, **{metric.name: metric.result() for metric in self.metrics}}

    def train_step(self, data: Any) -> Any:
        inputs, labels = data
        with tf.GradientTape() as tape:
            predicted = self(inputs, training=True)
            loss = self.loss_of(self, predicted, labels)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self._update_metrics(tf.reduce_sum(loss), inputs)

    def test_step(self, data: Any) -> Any:
        return self._update_metrics(self.loss_of(self, self(data[0]), data[1]), data[0])


def _of_samples(labels: Any, predicted: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(labels, predicted, from_logits=True)


def keras_loss(_: Any, predicted: Any, labels: Any) -> Any:
    return 0.5 * cross_entropy()(labels, predicted) + 0.1 * keras.losses.MeanSquaredError()(predicted * 0, predicted)


def own_mean(_: Any, predicted: Any, labels: Any) -> Any:
    penalty = tf.reduce_mean(tf.reduce_sum(predicted**2, axis=1))
    return tf.reduce_mean(_of_samples(labels, predicted)) + 0.1 * penalty - 0.01 * tf.reduce_mean(predicted)


def both_kinds(model: Any, predicted: Any, labels: Any) -> Any:
    return cross_entropy()(labels, predicted) + 2.0 * tf.reduce_mean(predicted**2) + sum(model.losses)


def sum_by_count(_: Any, predicted: Any, labels: Any) -> Any:
    return tf.reduce_sum(_of_samples(labels, predicted)) / tf.cast(tf.shape(predicted)[0], tf.float32)


def sum_of_samples(_: Any, predicted: Any, labels: Any) -> Any:
    return 0.02 * tf.reduce_sum(_of_samples(labels, predicted))


def vector_of_samples(_: Any, predicted: Any, labels: Any) -> Any:
    return 0.02 * _of_samples(labels, predicted)


def over_global_batch(_: Any, predicted: Any, labels: Any) -> Any:
    """As TensorFlow's guide of custom training says."""
    return tf.nn.compute_average_loss(_of_samples(labels, predicted), global_batch_size=21)


def _regularized() -> keras.Model:
    penalty = keras.regularizers.L2(0.05)
    return classifier(lambda: [keras.layers.Dense(16, activation="relu", kernel_regularizer=penalty)])


def _fitted(strategy: tf.distribute.Strategy, loss: Any, data: Any = None) -> Outcome:
    network = _regularized if loss is both_kinds else classifier
    data = dataset(21) if data is None else data
    fit = {"validation_data": data} if loss in (keras_loss, own_mean) else {}
    arguments = {"data": data, "loss": lambda: None, "metrics": lambda: None, "fit": fit}
    return fitted(strategy, lambda: Adam(0.01), model=lambda: OwnStep(loss, network), **arguments)


@case()
def own_losses_and_logs(strategy: tf.distribute.Strategy) -> Outcome:
    losses = (keras_loss, own_mean, both_kinds, sum_by_count, sum_of_samples, over_global_batch)
    return {loss.__name__: _fitted(strategy, loss) for loss in losses}


@case()
def own_losses_of_static_batches(strategy: tf.distribute.Strategy) -> Outcome:
    data = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(32, drop_remainder=True)
    losses = (own_mean, sum_by_count, sum_of_samples, vector_of_samples)
    return {loss.__name__: _fitted(strategy, loss, data) for loss in losses}


class OtherNames(OwnStep):
    """Logs the results of its metrics under other names than theirs."""

    def _update_metrics(self, loss: Any, inputs: Any) -> dict[str, Any]:
        return {f"its_{name}": value for name, value in super()._update_metrics(loss, inputs).items()}


@case()
def logs_under_other_names(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01), model=lambda: OtherNames(own_mean), data=dataset(21))


class GuideStep(keras.Model):
    """The step of Keras' guide: `compute_loss`, and the tracker among the model's metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.network = classifier()

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@case()
def step_of_the_guide(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01), model=GuideStep, data=dataset(23))


class MeanAndPenalty(keras.Model):
    """A `compute_loss` that adds a mean to Keras' losses, in Keras' own step."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _regularized()

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.3 * ops.mean(y_pred**2)


class DecoratedStep(OwnStep):
    """As the methods of public examples are decorated."""

    train_step = tf.function(OwnStep.train_step, jit_compile=True)
    test_step = tf.function(OwnStep.test_step)


class OwnCall(keras.losses.Loss):
    """A loss that reduces by itself."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))


@case()
def decorated_steps_and_losses(strategy: tf.distribute.Strategy) -> Outcome:
    nothing: Any = {"loss": lambda: None, "metrics": lambda: None, "data": dataset(21)}
    return {
        "step": fitted(strategy, lambda: SGD(0.1), model=lambda: DecoratedStep(own_mean), **nothing),
        "loss": fitted(strategy, lambda: SGD(0.1), data=dataset(21), loss=OwnCall),
    }


@case()
def compute_loss_that_adds_a_mean(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01), model=MeanAndPenalty, data=dataset(21))


def _network(inputs: int, outputs: int) -> keras.Model:
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(outputs)])


class Gan(keras.Model):
    """WGAN-GP, or DCGAN with Keras' losses, with noise that does not depend on the replica."""

    def __init__(self, with_penalty: bool) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.generator, self.critic = _network(FEATURES, FEATURES), _network(FEATURES, 1)
        self.with_penalty = with_penalty
        self.critic_loss, self.generator_loss = (keras.metrics.Mean(name=name) for name in ("critic", "generator"))

    def compile(self, critic_optimizer: Any, generator_optimizer: Any) -> None:
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, inputs: Any) -> Any:
        return self.critic(inputs)

    def _penalty(self, real: Any, fake: Any) -> Any:
        middle = 0.3 * real + 0.7 * fake
        with tf.GradientTape() as tape:
            tape.watch(middle)
            scores = self.critic(middle, training=True)
        slopes = tf.sqrt(tf.reduce_sum(tape.gradient(scores, [middle])[0] ** 2, axis=[1]))
        return tf.reduce_mean((slopes - 1.0) ** 2)

    def train_step(self, data: Any) -> Any:
        real, noise = data
        samples = tf.shape(real)[0]
        fake = self.generator(noise)
        with tf.GradientTape() as tape:
            if self.with_penalty:
                cost = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
                critic_loss = cost + 10.0 * self._penalty(real, fake)
            else:
                labels = tf.concat([tf.ones((samples, 1)), tf.zeros((samples, 1))], axis=0)
                critic_loss = self.cross_entropy(labels, self.critic(tf.concat([fake, real], axis=0)))
        gradients = tape.gradient(critic_loss, self.critic.trainable_variables)
        self.critic_optimizer.apply_gradients(zip(gradients, self.critic.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            scores = self.critic(self.generator(noise))
            if self.with_penalty:
                generator_loss = -tf.reduce_mean(scores)
            else:
                generator_loss = self.cross_entropy(tf.zeros((samples, 1)), scores)
        gradients = tape.gradient(generator_loss, self.generator.trainable_variables)
        self.generator_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables, strict=True))
        self.critic_loss.update_state(critic_loss)
        self.generator_loss.update_state(generator_loss)
        return {"critic": self.critic_loss.result(), "generator": self.generator_loss.result(), "cost": critic_loss}


@case()
def generative_adversarial_networks(strategy: tf.distribute.Strategy) -> Outcome:
    outcomes = {}
    for with_penalty in (True, False):
        with strategy.scope():
            model = Gan(with_penalty)
            model.compile(Adam(0.01), SGD(0.1))
        history = model.fit(dataset(21, INPUTS, INPUTS[::-1] * TARGETS), epochs=2, verbose=0)
        outcomes[str(with_penalty)] = {"weights": model.get_weights(), "logs": history.history}
    return outcomes


class OfSequences(keras.Model):
    """A layer on sequences, which TensorFlow joins with the samples and separates again, and a loss of the user."""

    def __init__(self, loss_of: Any) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(7, 4)
        self.dense = keras.layers.Dense(7, activation="softmax")
        self.loss_of = loss_of

    def call(self, tokens: Any) -> Any:
        return self.dense(self.embedding(tokens))

    def train_step(self, data: Any) -> Any:
        tokens, labels = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(labels, self(tokens))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def _sum_over_sequences(_: Any, probabilities: Any) -> Any:
    return tf.reduce_sum(probabilities**2)


def _masked_cross_entropy(labels: Any, probabilities: Any) -> Any:
    mask = tf.cast(labels != 0, "float32")
    values = keras.losses.SparseCategoricalCrossentropy(reduction="none")(labels, probabilities)
    return tf.reduce_sum(values * mask) / tf.reduce_sum(mask)


@case()
def own_losses_of_sequences(strategy: tf.distribute.Strategy) -> Outcome:
    """In batches of a static size, and in batches of which the last one is smaller."""
    tokens = np.arange(32 * 5).reshape(32, 5) * 13 % 7 * (np.arange(5) <= np.arange(32)[:, None] % 5)
    samples = tf.data.Dataset.from_tensor_slices((tokens, tokens))
    programs = {_sum_over_sequences: samples.batch(8, drop_remainder=True), _masked_cross_entropy: samples.batch(12)}
    nothing: Any = {"loss": lambda: None, "metrics": lambda: None, "epochs": 1}

    def model(loss: Any) -> keras.Model:
        keras.utils.set_random_seed(0)
        built = OfSequences(loss)
        built(tokens[:1])
        return built

    return {
        loss.__name__: fitted(strategy, lambda: SGD(0.1), model=lambda own=loss: model(own), data=data, **nothing)
        for loss, data in programs.items()
    }
