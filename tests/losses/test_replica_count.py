"""The number of replicas is a number like any other, and is recognized in the constants that it becomes."""

import json
import pickle

import pytest
import tensorflow as tf

from tfdist.losses.replica_count import power_of_count, replica_count

pytestmark = pytest.mark.usefixtures("cpus")
COUNT = replica_count(2)
VALUES = {
    "itself": (lambda: COUNT, 2, 1),
    "inverse": (lambda: 1 / COUNT, 0.5, -1),
    "global batch": (lambda: 8 * COUNT, 16, 1),
    "replica's batch": (lambda: 16 // COUNT, 8, -1),
    "half of the inverse": (lambda: (1 / COUNT) * 0.5, 0.25, -1),
    "square": (lambda: COUNT * COUNT, 4, 2),
    "by a float": (lambda: COUNT / 8.0, 0.25, 1),
    "none left": (lambda: (3 * COUNT) / COUNT, 3.0, 0),
    "sum": (lambda: COUNT + 1, 3, 0),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    function, value, power = VALUES[name]
    assert function() == value
    powers = []

    @tf.function
    def convert():
        for dtype in (None, tf.float32):
            if dtype is not None or isinstance(value, int):
                powers.append(power_of_count(tf.convert_to_tensor(function(), dtype)))
        return tf.constant(1.0) * function()

    assert float(convert()) == value
    assert set(powers) <= {power}


def test_a_float_as_the_left_operand_forgets_it():
    """Python asks a float before a subclass of int."""
    assert type(1.0 / COUNT) is float


def test_quotients_of_tensors():
    @tf.function
    def quotients(x):
        return x / COUNT, tf.divide(x, COUNT), x * (1 / COUNT), COUNT * x, x // COUNT

    for function in (quotients, quotients.python_function):
        assert [float(value) for value in function(tf.constant(6.0))] == [3, 3, 3, 12, 3]


def test_it_is_a_plain_number_elsewhere():
    assert json.dumps([COUNT, 1 / COUNT]) == "[2, 0.5]"
    assert type(pickle.loads(pickle.dumps(COUNT))) is int
    assert f"{COUNT} {1 / COUNT}" == "2 0.5" and list(range(COUNT)) == [0, 1] and hash(COUNT) == 2
    assert tf.zeros([COUNT, 3]).shape == (2, 3)
    assert len(tf.split(tf.zeros([4]), COUNT)) == 2
    assert next(iter(tf.data.Dataset.range(9).batch(2 * COUNT))).shape == 4
