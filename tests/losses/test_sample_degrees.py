"""What is known of a loss from its graph: a mean over the samples, a sum, or neither; and its terms."""

import pytest
import tensorflow as tf

from tfdist.losses.loss_scaling import loss_terms
from tfdist.losses.sample_degrees import SampleDegrees
from tfdist.tensorflow_internals.function_graphs import user_line

pytestmark = pytest.mark.usefixtures("cpus")

SAMPLES, FEATURES = 8, 8  # equal, so that the size of an axis does not tell which it is


def traced(loss_of, samples, function=lambda *_: None):
    """Calls `function(loss, degrees)` while `loss_of(data, weights)` is traced; returns its result."""
    weights = tf.Variable(tf.ones([FEATURES, FEATURES]))
    found = []

    @tf.function(input_signature=[tf.TensorSpec([samples, FEATURES])])
    def step(data):
        degrees = SampleDegrees(data, tf.shape(data)[0] if samples is None else samples)
        found.append(function(loss_of(data, weights), degrees))

    step.get_concrete_function()
    return found[0]


def degree(loss_of, samples):
    return traced(loss_of, samples, lambda loss, degrees: degrees.degree(loss))


def recurrent(x):
    """Outputs of the shape [samples, 5, features] of a loop."""
    steps = tf.scan(lambda state, _: 0.5 * state, tf.range(5), initializer=x)
    return tf.transpose(steps, [1, 0, 2])


def gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = function(x)
    return tape.gradient(value, x)


MEANS = {
    "mean": lambda x, w: tf.reduce_mean(x @ w),
    "mean of sums": lambda x, w: tf.reduce_mean(tf.reduce_sum(x @ w, axis=1)),
    "sum of means": lambda x, w: tf.reduce_sum(tf.reduce_mean(x, axis=0)),
    "sum by count": lambda x, w: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32),
    "sum by size": lambda x, w: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
    "weights": lambda x, w: tf.reduce_sum(w**2) + tf.nn.l2_loss(w),
    "difference": lambda x, w: 0.5 * (tf.reduce_mean(x) - tf.reduce_mean(x @ w)) + 0.0,
    "of noise": lambda x, w: tf.reduce_mean(tf.random.normal(tf.stack([tf.shape(x)[0], 3]))),
    "hinge": lambda x, w: tf.reduce_mean(tf.maximum(x, 0.0)),
    "outputs of a loop": lambda x, w: tf.reduce_mean(recurrent(x)),
    "gradient penalty": lambda x, w: tf.reduce_mean(tf.norm(gradient(lambda y: (y * w[0]) @ w, x), axis=1)),
    "normalized": lambda x, w: tf.reduce_mean(tf.nn.softmax(x - tf.reduce_max(x, axis=1, keepdims=True))[:, :2]),
    "cross-entropy of both halves": lambda x, w: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(tf.concat([x**2, x], axis=0), tf.concat([x, x], axis=0) @ w)
    ),
    "stacked": lambda x, w: tf.reduce_sum([tf.reduce_mean(x), tf.reduce_mean(x**2)]),
}
PARTS = {
    "sum": lambda x, w: tf.reduce_sum(x @ w),
    "values of samples": lambda x, w: tf.reduce_mean(x, axis=1),
    "sum by a constant": lambda x, w: tf.reduce_sum(x) / 100.0,
    "flattened": lambda x, w: tf.reduce_sum(tf.reshape(x, [-1])),
    "l2_loss": lambda x, w: tf.nn.l2_loss(x),
    "contraction": lambda x, w: tf.einsum("ij,ij->", x, x),
    "in a function": lambda x, w: tf.function(tf.reduce_sum)(x),
    "in a condition": lambda x, w: tf.cond(w[0, 0] > 0, lambda: tf.reduce_sum(x), lambda: 0.0),
    "noise": lambda x, w: tf.reduce_sum(tf.random.normal(tf.stack([tf.shape(x)[0], 3]))),
    "transposed": lambda x, w: tf.reduce_sum(tf.transpose(x), axis=1),
    "sum of a loop": lambda x, w: tf.reduce_sum(recurrent(x)),
    "matrix of samples": lambda x, w: tf.reduce_sum(tf.matmul(x, x, transpose_a=True)),
    "both halves": lambda x, w: tf.reduce_sum(tf.concat([x, x], axis=0), axis=[0, 1]),
}
NEITHER = {
    "root of a sum": lambda x, w: tf.sqrt(tf.reduce_sum(x)),
    "logarithm of a sum": lambda x, w: tf.math.log(tf.reduce_sum(x)),
    "both": lambda x, w: tf.reduce_sum(x) + tf.reduce_mean(x),
    "maximum": lambda x, w: tf.reduce_max(x),
    "first sample": lambda x, w: tf.reduce_sum(x[0]),
    "function of a mean": lambda x, w: tf.exp(tf.reduce_mean(x)) ** 2,
    "larger mean": lambda x, w: tf.maximum(tf.reduce_mean(x), 0.0),
    "mean by a sum": lambda x, w: tf.reduce_mean(x) * tf.reduce_sum(tf.abs(x)),
    "quotient": lambda x, w: tf.reduce_sum(x) / tf.reduce_sum(x**2),
    "quotient of means by weights": lambda x, w: tf.reduce_mean(x) / tf.reduce_mean(x @ w),
    "samples of a row": lambda x, w: tf.reduce_sum(tf.matmul(x, x, transpose_b=True)),
    "inverse number": lambda x, w: tf.reduce_sum(w) / tf.cast(tf.shape(x)[0], tf.float32),
    "half of the samples": lambda x, w: tf.reduce_mean(x[: tf.shape(x)[0] // 2]),
    "shape from a sum": lambda x, w: tf.reduce_mean(tf.reduce_sum(tf.reshape(x @ w, tf.shape(x)[::-1] + [0, 0]), 0)),
    "conditional": lambda x, w: tf.cond(x[0, 0] > 0, lambda: tf.reduce_sum(x), lambda: 0.0),
}


@pytest.mark.parametrize("samples", [None, SAMPLES])
@pytest.mark.parametrize("name", MEANS)
def test_means(name, samples):
    assert degree(MEANS[name], samples) == 0


@pytest.mark.parametrize("samples", [None, SAMPLES])
@pytest.mark.parametrize("name", PARTS)
def test_parts(name, samples):
    assert degree(PARTS[name], samples) == 1


@pytest.mark.parametrize("samples", [None, SAMPLES])
@pytest.mark.parametrize("name", NEITHER)
def test_neither(name, samples):
    assert degree(NEITHER[name], samples) not in (0, 1)


def test_a_sum_by_the_number_of_rows_that_is_known_while_tracing():
    assert degree(lambda x, w: tf.reduce_sum(x) / x.shape[0], SAMPLES) == 0
    assert degree(lambda x, w: tf.reduce_sum(x) * (1 / x.shape[0]), SAMPLES) == 0
    assert degree(lambda x, w: tf.reduce_sum(x) / (2 * x.shape[0]), SAMPLES) == 1


def test_marked_tensors_have_the_given_degree():
    def loss_of(x, _):
        degrees = SampleDegrees(x, SAMPLES)
        mean = tf.reduce_mean(x)
        degrees.mark(mean, 1)
        return [degrees.degree(value) for value in (mean, 3.0 * mean, mean + tf.reduce_sum(x), mean / mean)]

    assert traced(loss_of, SAMPLES, lambda degrees, _: degrees) == [1, 1, 1, None]


def test_terms():
    def loss(x, w):
        parts = tf.reduce_sum(x), tf.reduce_mean(x), tf.reduce_sum(w)
        return -tf.reduce_sum(2.0 * (parts[0] + parts[1]) - parts[2] / 4.0)

    terms = traced(loss, None, lambda value, degrees: loss_terms(value, degrees))
    assert [(term.coefficient, term.degree) for term in terms] == [(-2.0, 1), (-2.0, 0), (1.0, 0)]


def test_terms_of_one_degree_stay_together():
    terms = traced(MEANS["difference"], None, lambda value, degrees: loss_terms(value, degrees))
    assert [(term.coefficient, term.degree) for term in terms] == [(1.0, 0)]


def test_the_line_of_the_user():
    def loss(x, _):
        return tf.sqrt(tf.reduce_sum(x))

    line = traced(loss, None, lambda value, _: user_line(value))
    assert line == f"{__file__}:{loss.__code__.co_firstlineno + 1}, in loss"
