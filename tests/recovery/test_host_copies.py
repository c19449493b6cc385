"""A copy that is made while the next step runs has the values at the time of the request."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.recovery.variable_copies import HostCopies

pytestmark = pytest.mark.usefixtures("cpus")
UPDATES = {
    "assign": lambda variable, number: variable.assign(tf.fill([40, 50], number)),
    "assign_add": lambda variable, number: variable.assign_add(tf.fill([40, 50], number)),
    "assign_sub": lambda variable, number: variable.assign_sub(tf.fill([40, 50], number)),
    "slice": lambda variable, number: variable[1:3].assign(tf.fill([2, 50], number)),
    "scatter_add": lambda variable, number: variable.scatter_add(tf.IndexedSlices(tf.fill([2, 50], number), [0, 3])),
    "scatter_update": lambda variable, number: variable.scatter_update(
        tf.IndexedSlices(tf.fill([2, 50], number), [0, 3])
    ),
}


@pytest.mark.parametrize("compiled", [None, False, True], ids=["eager", "function", "XLA"])
@pytest.mark.parametrize("update", UPDATES)
def test_a_later_update_does_not_change_it(update, compiled):
    variable, copies = tf.Variable(np.random.default_rng(0).normal(size=(40, 50)).astype("float32")), HostCopies()
    step = UPDATES[update] if compiled is None else tf.function(UPDATES[update], jit_compile=compiled)
    step(variable, tf.constant(1.0))  # sparse updates change how a variable is read from then on
    before = variable.numpy().copy()
    copied = copies.request("kernel", variable)
    step(variable, tf.constant(2.0))
    step(variable, tf.constant(3.0))
    copies.finish()
    np.testing.assert_array_equal(copied, before)
    assert not np.array_equal(variable.numpy(), before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "bool"])
def test_scalars_and_dtypes(dtype):
    for shape in ((), (0, 3), (2, 3)):
        variable, copies = tf.Variable(tf.cast(tf.fill(shape, 1), dtype)), HostCopies()
        copied = copies.request("a", variable)
        copies.finish()
        assert (copied.shape, copied.dtype.name) == (shape, dtype) and np.all(copied == 1)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_training_continues_while_it_is_copied(jit_compile):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(30, 8), keras.layers.Flatten(), keras.layers.Dense(4), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    model.compile("adam", loss="mse", jit_compile=jit_compile)
    ids, targets = np.arange(100).reshape(20, 5) % 30, np.ones((20, 1))
    model.fit(ids, targets, verbose=0)
    variables, copies = model.variables + model.optimizer.variables, HostCopies()
    before = [keras.ops.convert_to_numpy(variable).copy() for variable in variables]
    copied = [copies.request(str(index), variable.value) for index, variable in enumerate(variables)]
    model.fit(ids, targets, verbose=0)
    copies.finish()
    for variable, value, copy in zip(variables, before, copied, strict=True):
        np.testing.assert_array_equal(copy, value, variable.path)
    assert not np.array_equal(model.get_weights()[0], before[0])


def test_a_variable_of_another_shape_gets_a_new_array():
    copies = HostCopies()
    first, second = (copies.request("a", tf.Variable(tf.ones([size]))) for size in (2, 3))
    copies.finish()
    assert first.tolist() == [1, 1] and second.tolist() == [1, 1, 1]
