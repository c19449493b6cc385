"""Random generators outside of a model are restored, in the right order."""

import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_internals.seed_generators import forget_global_seed_generator, global_seed_generator
from tfdist.recovery.random_generators import (
    check_python_and_numpy,
    python_and_numpy_state,
    restore_python_and_numpy,
)
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.tensorflow_internals.runtime import global_generator

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(autouse=True)
def as_before():
    """Restores the generators after each test."""
    state, bit_generator = python_and_numpy_state(), np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(bit_generator)
    restore_python_and_numpy(state)
    tf.random.set_global_generator(None)
    forget_global_seed_generator()


def draws():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
        np.random.randint(1 << 40),
        np.random.permutation(9).tolist(),
    ]


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_python_and_numpy_resume(kind):
    np.random.set_bit_generator(kind(5))
    draws()  # leaves the second of two normal numbers behind, in both
    state = json.loads(json.dumps(python_and_numpy_state(), allow_nan=False))
    expected = [draws() for _ in range(3)]
    random.seed(1)
    np.random.seed(1) if kind is np.random.MT19937 else draws()
    check_python_and_numpy(state)
    restore_python_and_numpy(state)
    assert [draws() for _ in range(3)] == expected


def test_another_kind_of_generator_is_rejected():
    state = python_and_numpy_state()
    np.random.set_bit_generator(np.random.PCG64(5))
    with pytest.raises(ValueError, match=r"Received: MT19937 in the checkpoint\. Expected: PCG64"):
        check_python_and_numpy(state)


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", loss="mse")
    return made


def transferred(old, new):
    old, new = VariableSnapshots(TrainedModel(old)), VariableSnapshots(TrainedModel(new))
    for variables in (old, new):
        variables.build((tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])))
    return *old.snapshot()[1:], new


def test_keras_global_generator_resumes():
    keras.utils.set_random_seed(3)
    keras.random.normal([2])
    per_replica, description, variables = transferred(model(), model())
    state = python_and_numpy_state()
    expected = keras.random.normal([4]).numpy().tolist(), random.random()
    # A new process, in which nothing has drawn from it: it is made, which draws from Python's generator.
    forget_global_seed_generator()
    variables.restore_per_replica(per_replica, description)
    restore_python_and_numpy(state)
    assert (keras.random.normal([4]).numpy().tolist(), random.random()) == expected


def test_keras_global_generator_is_made_after_the_checkpoint_if_it_was_so():
    forget_global_seed_generator()
    per_replica, description, variables = transferred(model(), model())
    state = python_and_numpy_state()
    expected = keras.random.normal([4]).numpy().tolist(), random.random()
    # A new process, in which something has drawn before: here, the first draw of the run above.
    variables.restore_per_replica(per_replica, description)
    assert global_seed_generator() is None
    restore_python_and_numpy(state)
    assert (keras.random.normal([4]).numpy().tolist(), random.random()) == expected


@pytest.mark.parametrize("exists", [True, False])
def test_tensorflow_global_generator_resumes(exists):
    tf.random.set_global_generator(tf.random.Generator.from_seed(4))
    tf.random.get_global_generator().normal([3])
    per_replica, description, variables = transferred(model(), model())
    expected = tf.random.get_global_generator().normal([4]).numpy().tolist()
    if not exists:
        tf.random.set_global_generator(None)
    variables.restore_per_replica(per_replica, description)
    assert tf.random.get_global_generator().normal([4]).numpy().tolist() == expected


def test_no_generator_is_made_where_none_was():
    tf.random.set_global_generator(None)
    forget_global_seed_generator()
    per_replica, description, variables = transferred(model(), model())
    variables.restore_per_replica(per_replica, description)
    assert not any(name.startswith("generators") for name in per_replica)
    assert global_generator() is None and global_seed_generator() is None
