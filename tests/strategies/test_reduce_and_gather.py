"""`reduce` and `gather` within one process: TensorFlow's results, dtypes and errors, without collectives."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from stock_strategy import stock_mirrored

from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy
from tfdist.tensorflow_internals.tensorflow_symbols import CollectiveReplicaLauncher

DTYPES = ["float32", "int32", "uint8", "complex64", "bool"]


def on_all_devices(cpus):
    """The strategies of one process with all of its devices, which is what a single worker has."""
    return {"mirrored": MirroredStrategy(cpus), "one worker": MultiWorkerMirroredStrategy()}


@pytest.fixture(scope="module", params=["mirrored", "one worker"])
def strategies(request, cpus):
    """A strategy, and TensorFlow's on the same devices."""
    return on_all_devices(cpus)[request.param], stock_mirrored(cpus)


def replica_values(strategy, dtype):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.cast(tf.constant([context.replica_id_in_sync_group, 3]), dtype)
    )


def outcome(strategy, call, *, in_scope):
    """What a function that makes the call computes, with the types of its collectives, or its error's type."""

    @tf.function(autograph=False)
    def function():
        with strategy.scope() if in_scope else contextlib.nullcontext():
            return call(strategy)

    try:
        graph = function.get_concrete_function().graph
        result = function()
    except Exception as error:  # compared with TensorFlow's
        return type(error)
    collectives = [operation.type for operation in graph.get_operations() if operation.type.startswith("Collective")]
    return result.dtype, result.numpy().tolist(), collectives


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_function_reduces_as_tensorflow_does(strategies, dtype, in_scope):
    ours, theirs = (
        outcome(
            strategy,
            lambda strategy: strategy.reduce("SUM", replica_values(strategy, dtype), axis=None),
            in_scope=in_scope,
        )
        for strategy in strategies
    )
    assert ours == theirs
    if dtype == "bool":
        assert ours is TypeError
    else:
        assert ours == (tf.as_dtype(dtype), [6, 12], [])


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_function_gathers_as_tensorflow_does(strategies, dtype, in_scope):
    ours, theirs = (
        outcome(strategy, lambda strategy: strategy.gather(replica_values(strategy, dtype), axis=0), in_scope=in_scope)
        for strategy in strategies
    )
    gathered = np.array([0, 3, 1, 3, 2, 3, 3, 3]).astype(dtype).tolist()
    assert ours[:2] == (tf.as_dtype(dtype), gathered)
    if theirs is not TypeError:  # TensorFlow's collectives know a few dtypes
        assert ours == theirs


@pytest.mark.parametrize("in_scope", [False, True])
def test_shapes_that_differ_are_an_error_after_which_collectives_still_run(strategies, in_scope):
    def call(strategy):
        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.ones([context.replica_id_in_sync_group + 1])
        )
        return strategy.reduce("SUM", values, axis=None)

    assert [outcome(strategy, call, in_scope=in_scope) for strategy in strategies] == [ValueError, ValueError]
    strategy = strategies[0]

    @tf.function
    def summed():
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([2])))

    for local in strategy.experimental_local_results(summed()):
        np.testing.assert_array_equal(local, [4.0, 4.0])


@pytest.mark.parametrize("dtype", ["uint8", "complex64"])
def test_reduce_takes_every_dtype_eagerly(strategies, dtype):
    for strategy in strategies:
        result = strategy.reduce("SUM", replica_values(strategy, dtype), axis=None)
        assert (result.dtype, result.numpy().tolist()) == (tf.as_dtype(dtype), [6, 12])


def test_gather_is_traced_once_and_by_tensorflow_in_each_call(strategies, monkeypatch):
    launched = []
    stock = CollectiveReplicaLauncher.all_gather

    def all_gather(self, *arguments):
        launched.append(self)
        return stock(self, *arguments)

    monkeypatch.setattr(CollectiveReplicaLauncher, "all_gather", all_gather)
    counts = []
    for strategy in strategies:
        for rows in range(1, 8):
            values = strategy.run(lambda rows=rows: tf.ones([rows, 2], tf.float64))
            assert strategy.gather(values, axis=0).shape == (4 * rows, 2)
        counts.append(len(launched))
        launched.clear()
    assert counts == [4, 7 * 4]  # once for each replica


def test_a_strategy_of_given_devices_creates_variables_and_reduces_as_others_do():
    """TensorFlow's own tests create strategies so."""
    strategy = MultiWorkerMirroredStrategy._from_local_devices(("/device:CPU:0", "/device:CPU:1"))
    created = []

    def of_replica():
        if not created:
            created.append(tf.Variable(tf.zeros([])))
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        return created[0] + tf.distribute.get_replica_context().all_reduce("SUM", number + 1)

    function = tf.function(lambda: strategy.experimental_local_results(strategy.run(of_replica)), autograph=False)
    assert [float(value) for value in function()] == [3.0, 3.0]
    assert (strategy.num_replicas_in_sync, strategy.replicas_of_workers) == (2, (2,))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    inputs, weights = np.arange(30.0).reshape(10, 3) / 30, model.get_weights()
    model.fit(inputs, inputs.sum(1), batch_size=5, shuffle=False, verbose=0)
    alone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    alone.set_weights(weights)
    alone.compile(keras.optimizers.SGD(0.1), "mse")
    alone.fit(inputs, inputs.sum(1), batch_size=5, shuffle=False, verbose=0)
    for ours, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)
