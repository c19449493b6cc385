"""Which sample a replica without samples computes with."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from testing.data import SEQUENCES
from testing.programs import Program
from testing.same_training import assert_same_training

from tfdist.keras_internals.model_introspection import accepts_zeros, predicting_model
from tfdist.strategies import MirroredStrategy
from tfdist.training.replica_step import filled_if_empty, first_rows

pytestmark = pytest.mark.usefixtures("cpus")


def parts(*sizes):
    """Batches of a word, a vector and a number for each sample, of replicas with these sizes."""
    words = [np.array([f"{part}{row}" for row in range(size)], object) for part, size in enumerate(sizes)]
    return [(tf.constant(word, tf.string), tf.fill([len(word), 2], part + 1.0)) for part, word in enumerate(words)]


@pytest.mark.parametrize(
    ("sizes", "word", "vector"),
    [((2, 1), [b"00"], [[1, 1]]), ((0, 3), [b"10"], [[2, 2]]), ((0, 0, 2, 1), [b"20"], [[3, 3]]), ((0, 0), [], [])],
)
def test_the_first_row_of_a_part_that_has_samples(sizes, word, vector):
    for run in (first_rows, tf.function(first_rows, autograph=False)):
        words, vectors = run(parts(*sizes), or_zeros=False)
        assert words.numpy().tolist() == word
        assert vectors.numpy().tolist() == vector


def test_zeros_if_no_part_has_samples():
    words, vectors = first_rows(parts(0, 0), or_zeros=True)
    assert (words.numpy().tolist(), vectors.numpy().tolist()) == ([b""], [[0, 0]])
    assert first_rows(parts(0, 1), or_zeros=True)[0].numpy().tolist() == [b"10"]


def test_only_a_part_without_samples_is_filled():
    for samples, expected in ((0, [b"10"]), (2, [b"00", b"01"])):
        own, other = parts(samples, 1)
        filled = filled_if_empty(own, samples, first_rows([own, other], or_zeros=True))
        assert filled[0].numpy().tolist() == expected


def test_zeros_are_an_input_of_floats_and_of_layers_that_need_samples():
    floats, numbers, words = tf.zeros([0, 2]), tf.zeros([0, 2], tf.int64), tf.zeros([0, 2], tf.string)
    layers = keras.layers.Dense(1), keras.layers.Conv1D(1, 3), keras.layers.LSTM(1)
    dense, *others = (keras.Sequential([layer]) for layer in layers)
    assert accepts_zeros(dense, ({"a": floats}, numbers))
    for inputs in (numbers, words, (floats, words)):
        assert not accepts_zeros(dense, (inputs, floats))
        assert all(accepts_zeros(model, (inputs, floats)) for model in others)


class Positive(keras.layers.Layer):
    """Rejects samples that are not positive."""

    def call(self, inputs):
        with tf.control_dependencies([tf.debugging.assert_positive(inputs)]):
            return tf.identity(inputs)


def test_a_layer_that_rejects_zeros_is_given_none(cpus):
    inputs = np.random.default_rng(0).uniform(1.0, 2.0, size=(9, 2)).astype("float32")
    outcomes = []
    for strategy in (tf.distribute.get_strategy(), MirroredStrategy(cpus[:3])):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((2,)), Positive(), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices((inputs, inputs[:, 0])).batch(4)
        history = model.fit(data, verbose=0)
        evaluation = model.evaluate(data, verbose=0)
        one_row = model.predict(inputs[:1], verbose=0)
        outcomes.append([*model.get_weights(), history.history["loss"], evaluation, one_row])
    for one, other in zip(*outcomes, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_model_that_predicts_is_found(cpus):
    found = []

    class Recording(MirroredStrategy):
        def run(self, fn, *args, **kwargs):
            found.append(predicting_model(fn))
            return super().run(fn, *args, **kwargs)

    with Recording(cpus[:2]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile()
    model.predict(np.ones([2, 2]), verbose=0)
    assert found == [model]


def test_synchronized_statistics_leave_out_replicas_without_samples(cpus):
    """The last batch has one sample. A convolution needs one on each replica."""

    def normalized():
        statistics = keras.layers.BatchNormalization(synchronized=True)
        layers = [keras.layers.Conv1D(2, 3), statistics, keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((6, 3)), *layers])

    program = Program(normalized, SEQUENCES.first(9), lambda: keras.optimizers.SGD(0.1), batch_size=4)
    assert_same_training(MirroredStrategy(cpus[:2]), program, 1e-6)


def test_replicas_without_samples_accumulate_eagerly(cpus):
    """Of 4 rows, 3 replicas compute 2, 2 and 0, and write their accumulators together."""
    program = Program(micro_steps=2, batch_size=4, compile={"run_eagerly": True})
    assert_same_training(MirroredStrategy(cpus[:3]), program)
