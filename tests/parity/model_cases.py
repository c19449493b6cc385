"""Cases about models and loops: batch normalization, metrics, custom steps, custom loops, execution modes."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import INPUTS, LABELS, Outcome, case, classifier, cross_entropy, dataset, fitted

from tfdist.callbacks import GradientAccumulation

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD


@case()
def steps_per_execution(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01), data=dataset(23), steps_per_execution=2)


@case()
def compiled_by_xla(strategy: tf.distribute.Strategy) -> Outcome:
    """XLA compiles the replicas' parts of a step, and nothing of the reference."""
    compiles = strategy.num_replicas_in_sync > 1
    return fitted(strategy, lambda: Adam(0.01), data=dataset(23), jit_compile=compiles)


@case()
def run_eagerly(strategy: tf.distribute.Strategy) -> Outcome:
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(Adam(0.01, global_clipnorm=0.1))  # noqa: E731
    return fitted(strategy, optimizer, data=dataset(23), run_eagerly=True, epochs=1)


@case()
def run_eagerly_with_accumulation(strategy: tf.distribute.Strategy) -> Outcome:
    optimizer = lambda: SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    return fitted(strategy, optimizer, run_eagerly=True, epochs=1)


@case()
def run_eagerly_without_samples(strategy: tf.distribute.Strategy) -> Outcome:
    """Eagerly, with a last batch that leaves a replica without samples."""
    optimizer = lambda: SGD(0.1, gradient_accumulation_steps=2)  # noqa: E731
    plain = fitted(strategy, lambda: SGD(0.1), data=dataset(21), run_eagerly=True, epochs=1)
    return {"plain": plain, "accumulated": fitted(strategy, optimizer, data=dataset(21), run_eagerly=True, epochs=1)}


class OwnLoss(keras.Model):
    """A model that takes the mean of its loss by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.network = classifier()

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return keras.ops.mean((y_pred - keras.ops.expand_dims(keras.ops.cast(y, "float32"), -1)) ** 2)


@case()
def compute_loss_of_the_users_own(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: SGD(0.1), model=OwnLoss, data=dataset(21), metrics=lambda: None)


@case(reference_is_traced=True)  # Keras cannot train with it eagerly
def float8(strategy: tf.distribute.Strategy) -> Outcome:
    """Scales are the largest of all replicas', as they are of the whole batch in one process."""
    with strategy.scope():
        model = classifier()
        model.layers[0].quantize("float8")
        model.compile(SGD(0.1), loss=cross_entropy())
    # The largest values come in the second half of each batch: another replica's.
    scaled = INPUTS * np.where(np.arange(len(INPUTS)) % 16 < 8, 1.0, 5.0)[:, np.newaxis].astype("float32")
    model.fit(dataset(16, scaled, LABELS), epochs=1, verbose=0)
    return {
        "weights": [variable.numpy() for variable in model.variables if "amax" in variable.path]
        + [variable.numpy() for variable in model.variables if "inputs_scale" in variable.path]
    }


class _PartwiseBatchNormalization(keras.layers.BatchNormalization):
    """What batch normalization on `parts` replicas computes, in one process: every part by its own statistics."""

    parts = 1

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return super().call(inputs, training=False)
        mean, variance = self.moving_mean, self.moving_variance
        before = tf.identity(mean.value), tf.identity(variance.value)
        outputs, after = [], []
        for part in tf.split(inputs, self.parts):
            mean.assign(before[0])
            variance.assign(before[1])
            outputs.append(super().call(part, training=True))
            after.append((tf.identity(mean.value), tf.identity(variance.value)))
        mean.assign(tf.add_n([pair[0] for pair in after]) / self.parts)
        variance.assign(tf.add_n([pair[1] for pair in after]) / self.parts)
        return tf.concat(outputs, 0)


def _normalized(strategy: tf.distribute.Strategy, layer: Any, batch_size: int = 16) -> Outcome:
    with strategy.scope():
        model = classifier(lambda: [keras.layers.Dense(8), layer(), keras.layers.ReLU()])
        model.compile(SGD(0.1), loss=cross_entropy())
    history = model.fit(dataset(batch_size), epochs=2, validation_data=dataset(23), verbose=0)
    prediction = model.predict(INPUTS, verbose=0)
    return {"weights": model.get_weights(), "logs": history.history, "prediction": prediction}


def _partwise(strategy: tf.distribute.Strategy) -> Outcome:
    return _normalized(strategy, _PartwiseBatchNormalization)


@case(_partwise, reference_is_shared=False)
def batch_normalization(strategy: tf.distribute.Strategy) -> Outcome:
    """Normalizes by the replica's batch, keeps the mean of the replicas' statistics."""
    _PartwiseBatchNormalization.parts = strategy.num_replicas_in_sync  # for the reference, which runs next
    return _normalized(strategy, keras.layers.BatchNormalization)


@case(lambda strategy: _normalized(strategy, keras.layers.BatchNormalization, 22))
def synchronized_batch_normalization(strategy: tf.distribute.Strategy) -> Outcome:
    return _normalized(strategy, lambda: keras.layers.BatchNormalization(synchronized=True), 22)


class CustomStep(keras.Model):
    """A model with a custom step and custom metrics, as in Keras' guides."""

    def __init__(self) -> None:
        super().__init__()
        self.network = classifier()
        self.seen = keras.metrics.Sum(name="seen")
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def train_step(self, data: Any) -> Any:
        inputs, labels = data
        with tf.GradientTape() as tape:
            predicted = self(inputs, training=True)
            loss = self.compute_loss(y=labels, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.seen.update_state(keras.ops.ones_like(labels))
        self.norm.update_state(keras.ops.sum(predicted**2, axis=-1))
        mean = keras.ops.mean(predicted)  # of this replica's samples; no metric
        return {"seen": self.seen.result(), "norm": self.norm.result(), "mean": mean}


@case()
def custom_train_step(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01, clipnorm=0.1), model=CustomStep, data=dataset(23), metrics=lambda: None)


class TwoOptimizers(keras.Model):
    """Two networks with an optimizer each, trained in one step, as a generative adversarial network is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = classifier(), classifier()
        self.loss_function = cross_entropy()

    def call(self, inputs: Any) -> Any:
        return self.first(inputs) + self.second(inputs)

    def compile(self, optimizers: Any) -> None:
        super().compile()
        self.first_optimizer, self.second_optimizer = optimizers

    def train_step(self, data: Any) -> Any:
        inputs, labels = data
        for network, optimizer in ((self.first, self.first_optimizer), (self.second, self.second_optimizer)):
            with tf.GradientTape() as tape:
                loss = self.loss_function(labels, network(inputs, training=True))
            variables = network.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"outputs": keras.ops.mean(self(inputs))}


@case()
def two_optimizers_in_a_step(strategy: tf.distribute.Strategy) -> Outcome:
    with strategy.scope():
        model = TwoOptimizers()
        model.compile((Adam(0.01, global_clipnorm=0.1), SGD(0.1, momentum=0.9)))
    model.fit(dataset(23), epochs=2, verbose=0)
    return {"weights": model.first.get_weights() + model.second.get_weights()}


@case()
def custom_loop(strategy: tf.distribute.Strategy) -> Outcome:
    """The loop of TensorFlow's guide: the user divides by the global batch, the optimizer clips and accumulates."""
    with strategy.scope():
        model = classifier()
        optimizer = Adam(0.01, global_clipnorm=0.05, gradient_accumulation_steps=2)
    replicated = strategy.experimental_distribute_dataset(dataset(16))

    def replica_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    losses = [float(step(batch)) for _ in range(2) for batch in replicated]
    return {"weights": model.get_weights(), "logs": losses}


@case()
def accumulation_that_changes(strategy: tf.distribute.Strategy) -> Outcome:
    """More micro-steps from the second epoch on, with a remainder that is flushed."""
    return fitted(
        strategy,
        lambda: Adam(0.01),
        data=dataset(8),
        epochs=3,
        fit={"callbacks": [GradientAccumulation({0: 1, 1: 3, 2: 2})]},
    )
