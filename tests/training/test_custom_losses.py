"""A `train_step` with a loss that tfdist cannot follow: one warning with its line, and the functions that scale it."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.losses import loss_scaling as loss_warnings
from tfdist.strategies import MirroredStrategy
from tfdist.training import scale_loss_for_distribution, unscale_loss_for_distribution

pytestmark = pytest.mark.usefixtures("cpus")

INPUTS = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(loss_warnings, "_warned", set())


class Tracker(keras.metrics.Metric):
    """The user's own mean of a loss by batches."""

    def __init__(self):
        super().__init__(name="own")
        self.total, self.count = (self.add_weight(name=name, initializer="zeros") for name in ("total", "count"))

    def update_state(self, value):
        self.total.assign_add(value)
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


class OwnStep(keras.Model):
    def __init__(self, loss_of):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.loss_of, self.tracker = loss_of, Tracker()

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self(data))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(unscale_loss_for_distribution(loss))
        return {"own": self.tracker.result()}


def trained(strategy, loss_of, **arguments):
    """The weights and logs after two steps on four samples, with what was warned of by tfdist."""
    with strategy.scope():
        model = OwnStep(loss_of)
        model.compile(keras.optimizers.SGD(0.1), **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(tf.data.Dataset.from_tensor_slices(INPUTS).batch(4), verbose=0)
    said = [str(warning.message) for warning in caught if "loss" in str(warning.message)]
    return model.get_weights(), history.history["own"], said


def same(one, other, factor=1.0):
    return all(np.allclose(factor * a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


def mean_of(outputs):
    return tf.reduce_mean(outputs**2)


def in_a_function(outputs):
    return tf.function(mean_of)(outputs)


def of_python(outputs):
    return tf.ensure_shape(tf.numpy_function(lambda values: values.mean(), [outputs], tf.float32), []) * mean_of(
        outputs
    )


def root_of_a_sum(outputs):
    return tf.sqrt(tf.reduce_sum(outputs**2))


def scaled(outputs):
    return scale_loss_for_distribution(in_a_function(outputs))


def test_a_loss_that_cannot_be_followed_is_named_once(cpus):
    for loss_of in (of_python, root_of_a_sum):
        *_, said = trained(MirroredStrategy(cpus[:2]), loss_of)
        assert len(said) == 1
        assert "neither a mean nor a sum" in said[0]
        assert f"Received: {__file__}:{loss_of.__code__.co_firstlineno + 1}, in {loss_of.__name__}." in said[0]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_scaled_loss_is_right(cpus, run_eagerly):
    weights, logs, said = trained(MirroredStrategy(cpus[:2]), scaled, run_eagerly=run_eagerly)
    reference, own, _ = trained(tf.distribute.get_strategy(), scaled)
    assert same(weights, reference)
    assert same(logs, own)
    assert not said


def test_an_eager_loss_is_warned_of(cpus):
    *_, said = trained(MirroredStrategy(cpus[:2]), mean_of, run_eagerly=True)
    assert len(said) == 1
    assert "computes a loss eagerly" in said[0]


def test_a_mean_is_right_without_a_warning(cpus):
    weights, _, said = trained(MirroredStrategy(cpus[:2]), mean_of)
    assert same(weights, trained(tf.distribute.get_strategy(), mean_of)[0])
    assert not said


@pytest.mark.parametrize("by_nn", [False, True])
def test_a_step_that_reads_the_number_of_replicas_scales_its_loss_itself(cpus, by_nn):
    def loss_of(outputs):
        if by_nn:
            return tf.nn.scale_regularization_loss(mean_of(outputs))
        return mean_of(outputs) / tf.distribute.get_strategy().num_replicas_in_sync

    weights, _, said = trained(MirroredStrategy(cpus[:2]), loss_of)
    assert same(weights, trained(tf.distribute.get_strategy(), loss_of)[0])
    assert not said


def test_a_constant_that_may_be_the_number_of_replicas_is_named(cpus):
    def loss_of(outputs):
        return mean_of(outputs) / 2

    weights, _, said = trained(MirroredStrategy(cpus[:2]), loss_of)
    assert same(weights, trained(tf.distribute.get_strategy(), loss_of)[0])
    assert len(said) == 1
    assert "by 1/2, and there are 2 replicas: tfdist scales means itself, and takes this for a mean of this" in said[0]
    assert f"Received: {__file__}:" in said[0]


def test_a_constant_within_a_mean_is_named_if_the_number_was_read_from_the_same_strategy(cpus):
    def loss_of(outputs):
        return tf.reduce_mean(0.5 * outputs**2)

    strategy, other = MirroredStrategy(cpus[:2]), MirroredStrategy(cpus[:2])
    assert other.num_replicas_in_sync == 2
    assert not trained(strategy, loss_of)[2]
    assert len(trained(other, loss_of)[2]) == 1


def test_gradients_of_tensors_and_of_other_strategies_are_unchanged(cpus):
    MirroredStrategy(cpus[:2])
    gradients = []

    def loss_of(outputs):
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            mean = tf.reduce_mean(outputs**2)
        gradients.append(tf.reduce_sum(tape.gradient(mean, outputs) * outputs))
        return gradients[-1]

    ours = trained(MirroredStrategy(cpus[:2]), loss_of)
    assert same(ours[0], trained(tf.distribute.get_strategy(), loss_of)[0])
    variable = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        loss = variable**2
    assert float(tape.gradient(loss, variable)) == 6.0


def test_counts_in_metrics_are_those_of_keras(cpus):
    """Whole numbers of samples, and a scalar of a nested function, which cannot be followed, add up over replicas."""

    class Counting(OwnStep):
        def __init__(self):
            super().__init__(lambda outputs: tf.reduce_mean(outputs))
            self.sums = [keras.metrics.Sum(name=name) for name in ("number", "nested")]
            self.mean = keras.metrics.Mean(name="mean")

        @property
        def metrics(self):
            return [*self.sums, self.mean]

        def train_step(self, data):
            super().train_step(data)
            self.sums[0].update_state(tf.shape(data)[0])
            self.sums[1].update_state(sum_in_a_function(data))
            self.mean.update_state(tf.constant(3))
            return {metric.name: metric.result() for metric in self.metrics}

    logs = []
    for strategy in (MirroredStrategy(cpus[:2]), tf.distribute.get_strategy()):
        with strategy.scope():
            model = Counting()
            model.compile(keras.optimizers.SGD(0.1))
        history = model.fit(tf.data.Dataset.from_tensor_slices(INPUTS).batch(4), verbose=0).history
        logs.append({name: values[0] for name, values in history.items()})
    assert logs[0] == pytest.approx(logs[1], rel=1e-6)  # the order of a float32 sum
    assert logs[1]["number"] == 8 and logs[1]["mean"] == 3


@tf.function
def sum_in_a_function(data):
    return tf.reduce_sum(abs(data))
