"""Losses that users write in a `train_step`: equal to one process without a word, or warned of with their line."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from one_process import in_one_process

from tfdist.losses import loss_scaling as loss_warnings
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(24, 6)).astype("float32")
TARGETS = RANDOM.normal(size=(24, 4)).astype("float32") + 0.3
MASK = (RANDOM.uniform(size=24) < np.linspace(0.2, 0.95, 24)).astype("float32")
MASK[::4] = MASK[14] = 1
SQUARED_ERROR, ABSOLUTE_ERROR = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()


def replicas():
    return tf.distribute.get_strategy().num_replicas_in_sync


def errors(p, y):
    return tf.reduce_mean((p - y) ** 2, axis=-1)


def count(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


class Example:
    """A loss that keeps the number of replicas when it is made."""

    def __init__(self):
        self.replicas = replicas()


def in_a_function(p, y):
    return tf.function(lambda p, y: tf.reduce_mean(errors(p, y)))(p, y)


def of_halves(p, y):
    both = tf.concat([p, y], axis=0)
    real, generated = both[tf.shape(p)[0] :], both[: tf.shape(p)[0]]
    again, _ = tf.split(tf.nn.tanh(both), 2)
    return tf.reduce_mean(tf.square(real - generated)) + 0.1 * tf.reduce_mean(again)


def adversarial(p, y):
    """As in Keras' example of DCGAN, without its noise."""
    both, ones = tf.concat([p, y], axis=0), tf.ones((tf.shape(p)[0], 1))
    labels = tf.concat([ones, tf.zeros((tf.shape(y)[0], 1))], axis=0)
    labels += 0.0 * tf.random.uniform(tf.shape(labels))
    return keras.losses.BinaryCrossentropy()(labels, tf.nn.sigmoid(tf.reduce_sum(both, axis=1, keepdims=True)))


def recurrent(p, y):
    steps = tf.scan(lambda state, _: 0.5 * state, tf.range(3), initializer=p)
    return tf.reduce_mean(tf.reduce_sum(tf.transpose(steps, [1, 0, 2]) ** 2, axis=1) * y)


def gradient_penalty(p, y):
    """As in Keras' example of a WGAN, whose critic pads. The critic's ones are not values of samples."""
    with tf.GradientTape() as tape:
        tape.watch(p)
        padded = tf.pad(tf.reshape(p * y, [-1, 2, 2]), [[0, 0], [1, 1], [0, 0]]) ** 2
        judged = tf.reshape(padded, [-1, 8]) @ tf.ones((8, 1))
    return tf.reduce_mean((tf.norm(tape.gradient(judged, p), axis=1) - 1.0) ** 2)


def attention(p, y):
    scores = tf.nn.softmax(tf.matmul(p[:, :, None], y[:, :, None], transpose_b=True))
    return tf.reduce_mean(tf.einsum("bij,bj->bi", scores, p) ** 2)


EXACT = {
    "mean": lambda e, x, y, w, p: tf.reduce_mean((p - y) ** 2),
    "sum over the samples by their number": lambda e, x, y, w, p: tf.reduce_mean(
        tf.reduce_sum((p - y) ** 2, axis=0) / count(y)
    ),
    "vector": lambda e, x, y, w, p: 0.05 * errors(p, y),
    "matrix": lambda e, x, y, w, p: 0.05 * (p - y) ** 2,
    "stopped gradient": lambda e, x, y, w, p: tf.reduce_mean(tf.stop_gradient(abs(p - y)) * (p - y) ** 2),
    "own regularizer": lambda e, x, y, w, p: tf.reduce_mean(errors(p, y)) + 0.05 * tf.nn.l2_loss(e.kernel),
    "own regularizer and a sum": lambda e, x, y, w, p: 0.01 * tf.reduce_sum(errors(p, y)) + tf.nn.l2_loss(e.kernel),
    "constant": lambda e, x, y, w, p: tf.constant(3.0) + 0 * tf.reduce_mean(p),
    "divided by the replicas": lambda e, x, y, w, p: tf.reduce_mean(errors(p, y)) / replicas(),
    "divided by the replicas of the beginning": lambda e, x, y, w, p: 0.5 * (1 / e.replicas) * tf.reduce_mean(p**2),
    "divided inside of the mean": lambda e, x, y, w, p: tf.reduce_mean(errors(p, y) / e.replicas),
    "regularizer divided, too": lambda e, x, y, w, p: (
        tf.reduce_mean(errors(p, y)) / e.replicas + 0.05 * tf.nn.l2_loss(e.kernel) / e.replicas
    ),
    "average loss": lambda e, x, y, w, p: tf.nn.compute_average_loss(errors(p, y)),
    "average loss of a given batch": lambda e, x, y, w, p: tf.nn.compute_average_loss(
        errors(p, y), global_batch_size=8
    ),
    "scaled regularization": lambda e, x, y, w, p: (
        SQUARED_ERROR(y, p) + tf.nn.scale_regularization_loss(0.1 * tf.nn.l2_loss(e.kernel))
    ),
    "masked mean": lambda e, x, y, w, p: tf.math.divide_no_nan(tf.reduce_sum(w * errors(p, y)), tf.reduce_sum(w)),
    "masked mean with a guard": lambda e, x, y, w, p: (
        tf.reduce_sum(w * errors(p, y)) / tf.maximum(tf.reduce_sum(w), 1.0)
        + tf.reduce_sum(w * p[:, 0]) / (tf.reduce_sum(w) + 1e-7)
    ),
    "quotient of means": lambda e, x, y, w, p: tf.reduce_mean(w * errors(p, y)) / (tf.reduce_mean(w) + 0.1),
    "weighted mean with a mean": lambda e, x, y, w, p: (
        tf.reduce_sum(w * errors(p, y)) / tf.reduce_sum(w) + 0.1 * tf.reduce_mean(p) - 0.01 * tf.reduce_sum(p)
    ),
    "sum by a sum of ones": lambda e, x, y, w, p: (
        tf.reduce_sum(errors(p, y)) / tf.reduce_sum(tf.ones_like(errors(p, y)))
    ),
    "shape of Keras": lambda e, x, y, w, p: ops.sum((p - y) ** 2) / ops.cast(tf.shape(p)[0], "float32"),
    "reciprocal": lambda e, x, y, w, p: 0.1 * tf.reduce_sum(errors(p, y)) * tf.math.reciprocal(count(p)),
    "unstacked shape": lambda e, x, y, w, p: (
        0.1 * tf.reduce_sum(errors(p, y)) / tf.cast(tf.unstack(tf.shape(p))[0], tf.float32)
    ),
    "last element of a shape": lambda e, x, y, w, p: (
        tf.reduce_sum(errors(p, y)) / tf.cast(tf.shape(errors(p, y))[-1], tf.float32)
    ),
    "transposed": lambda e, x, y, w, p: tf.reduce_mean(tf.reduce_sum(tf.transpose((p - y) ** 2), axis=0)),
    "sum over ones": lambda e, x, y, w, p: 0.05 * tf.reduce_sum((tf.ones(tf.shape(x)) @ e.kernel) ** 2),
    "of Keras, a mean and a sum": lambda e, x, y, w, p: (
        SQUARED_ERROR(y, p) + 0.1 * tf.reduce_mean(p**2) - 0.01 * tf.reduce_sum(p)
    ),
    "in another dtype": lambda e, x, y, w, p: tf.cast(SQUARED_ERROR(y, p) + tf.reduce_mean(p**2), tf.float64),
    "in a function": lambda e, x, y, w, p: in_a_function(p, y),
    "of halves of a batch": lambda e, x, y, w, p: of_halves(p, y),
    "adversarial": lambda e, x, y, w, p: adversarial(p, y),
    "recurrent": lambda e, x, y, w, p: recurrent(p, y),
    "attention": lambda e, x, y, w, p: attention(p, y),
    "gradient penalty": lambda e, x, y, w, p: gradient_penalty(p, y),
    "time first": lambda e, x, y, w, p: tf.reduce_mean(
        tf.reduce_sum(tf.einsum("btd->tbd", tf.reshape(p, [-1, 2, 2])), axis=0) ** 2
    ),
    "cross-entropy": lambda e, x, y, w, p: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(y, axis=-1), p)
    ),
    "where": lambda e, x, y, w, p: tf.reduce_mean(tf.where(abs(p - y) < 1.0, (p - y) ** 2, abs(p - y))),
    "normalized": lambda e, x, y, w, p: tf.reduce_mean(tf.math.l2_normalize(p, axis=-1) * y),
    "condition": lambda e, x, y, w, p: tf.cond(
        tf.reduce_sum(e.kernel) * 0 < 1, lambda: tf.reduce_mean((p - y) ** 2), lambda: tf.reduce_mean(p)
    ),
}
WARNED = {
    "root of a mean": lambda e, x, y, w, p: tf.sqrt(tf.reduce_mean((p - y) ** 2)),
    "dice": lambda e, x, y, w, p: 1 - (2 * tf.reduce_sum(p * y) + 1) / (tf.reduce_sum(p**2) + tf.reduce_sum(y**2) + 1),
    "boolean mask": lambda e, x, y, w, p: tf.reduce_mean(tf.boolean_mask(errors(p, y), w > 0)),
    "gathered": lambda e, x, y, w, p: tf.reduce_mean(tf.gather(errors(p, y), tf.where(w > 0)[:, 0])),
    "feature matching": lambda e, x, y, w, p: tf.reduce_mean((tf.reduce_mean(p, 0) - tf.reduce_mean(y, 0)) ** 2),
    "deviation over the batch": lambda e, x, y, w, p: tf.reduce_mean(tf.nn.relu(1 - tf.math.reduce_std(p, axis=0))),
    "centred": lambda e, x, y, w, p: tf.reduce_mean((p - tf.reduce_mean(p, 0)) ** 2),
    "free bits": lambda e, x, y, w, p: tf.maximum(tf.reduce_mean(p**2), tf.reduce_mean(errors(p, y))),
    "product of means": lambda e, x, y, w, p: tf.reduce_mean(errors(p, y)) * tf.reduce_mean(p**2),
    "exponential of a mean": lambda e, x, y, w, p: tf.exp(0.3 * tf.reduce_mean(errors(p, y))),
    "distance of means": lambda e, x, y, w, p: tf.abs(tf.reduce_mean(p) - tf.reduce_mean(y)),
    "balanced": lambda e, x, y, w, p: (
        tf.stop_gradient(tf.reduce_mean(errors(p, y)) / tf.reduce_mean(p**2)) * tf.reduce_mean(p**2)
    ),
    "root of Keras": lambda e, x, y, w, p: tf.sqrt(SQUARED_ERROR(y, p)),
    "ratio of Keras": lambda e, x, y, w, p: SQUARED_ERROR(y, p) / ABSOLUTE_ERROR(y, p),
    "product with Keras": lambda e, x, y, w, p: SQUARED_ERROR(y, p) * tf.reduce_mean(p**2),
    "contrastive": lambda e, x, y, w, p: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(p)[0]), tf.matmul(p, y, transpose_b=True))
    ),
    "contrastive by Keras": lambda e, x, y, w, p: keras.losses.CategoricalCrossentropy(from_logits=True)(
        tf.eye(tf.shape(p)[0]), tf.matmul(p, y, transpose_b=True)
    ),
    "pairs": lambda e, x, y, w, p: tf.reduce_mean(tf.reduce_sum((p[:, None] - p[None]) ** 2, -1)),
    "sum of pairs": lambda e, x, y, w, p: 0.01 * tf.reduce_sum((p[:, None] - p[None]) ** 2),
    "correlation": lambda e, x, y, w, p: tf.reduce_sum((tf.matmul(p, y, transpose_a=True) / count(p) - tf.eye(4)) ** 2),
    "softmax over the samples": lambda e, x, y, w, p: tf.reduce_mean(
        tf.nn.softmax(errors(p, y), axis=0) * errors(p, y)
    ),
    "hardest samples": lambda e, x, y, w, p: tf.reduce_mean(
        tf.math.top_k(errors(p, y), k=tf.shape(p)[0] // 2 + 1).values
    ),
    "weights over their mean": lambda e, x, y, w, p: tf.reduce_mean(w / tf.reduce_mean(w) * errors(p, y)),
    "neighbours": lambda e, x, y, w, p: tf.reduce_mean((p - tf.reverse(p, axis=[0])) ** 2),
    "first sample": lambda e, x, y, w, p: tf.reduce_mean(p[:1] ** 2),
    "regularizer by the samples": lambda e, x, y, w, p: tf.nn.l2_loss(e.kernel) / count(x),
    "of Python": lambda e, x, y, w, p: tf.numpy_function(lambda a: a.mean(), [p], tf.float32) * tf.reduce_mean(p),
    "condition of the samples": lambda e, x, y, w, p: tf.cond(
        tf.reduce_mean(x) < 9, lambda: tf.reduce_mean((p - y) ** 2), lambda: tf.reduce_mean(p)
    ),
    "loop over the samples": lambda e, x, y, w, p: tf.foldl(
        lambda total, row: total + tf.reduce_mean(row**2), p, initializer=0.0
    ),
}
AMBIGUOUS = {
    "number of samples": lambda e, x, y, w, p: tf.reduce_sum(errors(p, y)) / y.shape[0],
    "inverse number of samples": lambda e, x, y, w, p: tf.reduce_sum(errors(p, y)) * (1 / y.shape[0]),
    "number of elements": lambda e, x, y, w, p: tf.reduce_sum((p - y) ** 2) / (y.shape[0] * y.shape[1]),
    "multiple of the number": lambda e, x, y, w, p: (1 / (3 * y.shape[0])) * tf.reduce_sum((p - y) ** 2),
}


class Heads(keras.Model):
    """A layer for each loss, which no other loss trains."""

    def __init__(self, losses):
        super().__init__()
        self.heads = [keras.layers.Dense(4, kernel_initializer="ones") for _ in losses]
        self.losses_of_user = [(loss, Example()) for loss in losses]

    def build(self, shape):
        for head in self.heads:
            head.build(shape)

    def call(self, inputs):
        return [head(inputs) for head in self.heads]

    def train_step(self, data):
        x, y, w = data
        gradients, logs = [], {}
        for index, (head, (loss_of, example)) in enumerate(zip(self.heads, self.losses_of_user, strict=True)):
            with tf.GradientTape() as tape:
                example.kernel = tf.convert_to_tensor(head.kernel)
                loss = loss_of(example, x, y, w, 0.2 * head(x))
            gradients += tape.gradient(loss, head.trainable_variables)
            logs[f"loss{index:03}"] = tf.reduce_mean(loss) if loss.shape.rank else loss
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return logs


def trained(strategy, losses, *, batch_size, is_static):
    """The weights of each head, the logs, and what was said of each loss, by the line of its function."""
    with strategy.scope():
        model = Heads([*losses.values()])
        model.build((None, 6))
        model.compile(keras.optimizers.SGD(0.05))
    samples = 24 if is_static else 15  # the last batch has one sample, and a replica none
    data = tf.data.Dataset.from_tensor_slices((INPUTS[:samples], TARGETS[:samples], MASK[:samples]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = model.fit(data.batch(batch_size, drop_remainder=is_static), verbose=0).history
    said = [str(warning.message) for warning in caught if "Received" in str(warning.message)]
    weights = [np.concatenate([np.ravel(value) for value in head.get_weights()]) for head in model.heads]
    return dict(zip(losses, weights, strict=True)), dict(zip(losses, logs.values(), strict=True)), said


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(loss_warnings, "_warned", set())


def differences(ours, reference):
    return {name: float(np.max(np.abs(np.subtract(value, reference[name])))) for name, value in ours.items()}


@pytest.mark.parametrize("is_static", [False, pytest.param(True, marks=pytest.mark.long)])
def test_exact_losses(cpus, is_static):
    """Sums of float32 in another order: 1e-5 is ten times the largest difference that was seen."""
    arguments = {"batch_size": 8 if is_static else 7, "is_static": is_static}
    weights, logs, said = trained(MirroredStrategy(cpus[:2]), EXACT, **arguments)
    reference, own, _ = in_one_process(trained, EXACT, **arguments)
    assert not said
    wrong = {name: value for name, value in differences(weights, reference).items() if not value <= 1e-5}
    assert not wrong
    # Two functions of the table return another loss for each number of replicas; vectors are logged as means.
    same = {name: value for name, value in logs.items() if name not in {"vector", "matrix"}}
    assert not {name: value for name, value in differences(same, own).items() if not value <= 1e-4}


def test_a_gradient_penalty_with_batches_of_a_static_size_is_exact(cpus):
    losses = {"gradient penalty": EXACT["gradient penalty"]}
    arguments = {"batch_size": 8, "is_static": True}
    weights, _, said = trained(MirroredStrategy(cpus[:2]), losses, **arguments)
    reference, *_ = in_one_process(trained, losses, **arguments)
    assert not said and max(differences(weights, reference).values()) <= 1e-5


@pytest.mark.parametrize("is_static", [False, pytest.param(True, marks=pytest.mark.long)])
def test_losses_that_are_not_linear_in_the_samples_are_warned_of(cpus, is_static):
    *_, said = trained(MirroredStrategy(cpus[:2]), WARNED, batch_size=8 if is_static else 7, is_static=is_static)
    assert len(said) == len(WARNED)
    assert all("neither a mean nor a sum" in text for text in said)


def test_literals_that_may_be_numbers_of_samples_are_warned_of(cpus):
    arguments = {"batch_size": 8, "is_static": True}
    weights, _, said = trained(MirroredStrategy(cpus[:2]), AMBIGUOUS, **arguments)
    reference, *_ = in_one_process(trained, AMBIGUOUS, **arguments)
    assert len(said) == len(AMBIGUOUS)
    assert all("divided by a number that equals" in text for text in said)
    found = differences(weights, reference)
    assert found["number of samples"] <= 1e-5 and found["inverse number of samples"] <= 1e-5


def test_what_is_warned_of_counts_as_a_mean(cpus, monkeypatch):
    """If both replicas have the same samples, a function of their mean is that of one process."""
    losses = {
        "root": WARNED["root of a mean"],
        "root and a loss of Keras": lambda e, x, y, w, p: SQUARED_ERROR(y, p) + tf.sqrt(tf.reduce_mean((p - y) ** 2)),
    }
    for name in ("INPUTS", "TARGETS", "MASK"):
        monkeypatch.setitem(globals(), name, np.tile(globals()[name][:4], [6] + [1] * (globals()[name].ndim - 1)))
    arguments = {"batch_size": 8, "is_static": True}
    weights, _, said = trained(MirroredStrategy(cpus[:2]), losses, **arguments)
    assert len(said) == len(losses)
    found = differences(weights, in_one_process(trained, losses, **arguments)[0])
    assert max(found.values()) <= 1e-5
