"""The local replicas share the traced function of an update, and compute the bits of an update each."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from testing import data, models
from testing.programs import Program

from tfdist.keras_internals import optimizers
from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals import shared_operations


@pytest.fixture
def traces(monkeypatch):
    """The number of variables of each function that was traced; 0 if it could not be shared."""
    counts = []
    trace = shared_operations._trace

    def counted(*arguments):
        traced = trace(*arguments)
        counts.append(0 if traced is None else len(traced.variables))
        return traced

    monkeypatch.setattr(shared_operations, "_trace", counted)
    return counts


def train(cpus, optimizer, model=models.dense, samples=data.NUMBERS, **arguments):
    """Returns the values of all copies of the variables."""
    keras.backend.clear_session()
    strategy = MirroredStrategy(cpus[:2])
    model = Program(model, samples, optimizer, compile=arguments).trained(strategy).model
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return [[one.numpy() for one in strategy.experimental_local_results(variable.value)] for variable in variables]


def scheduled():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
    return keras.optimizers.AdamW(schedule, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=4)


def accumulated():
    return keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2, global_clipnorm=0.5)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=64.0)


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        pytest.param(keras.optimizers.Adam, {"steps_per_execution": 3}, marks=pytest.mark.long),
        (keras.optimizers.Adam, {"model": models.words, "samples": data.WORDS}),
        (accumulated, {}),
        pytest.param(scheduled, {}, marks=pytest.mark.long),
        pytest.param(scaled, {}, marks=pytest.mark.long),
    ],
)
def test_replicas_share_an_update_bit_for_bit(cpus, traces, monkeypatch, optimizer, arguments):
    shared = train(cpus, optimizer, **arguments)
    assert len(traces) == 1
    assert traces[0] >= 4
    monkeypatch.setattr(optimizers, "call_shared", lambda *given, **named: False)
    for found, expected in zip(shared, train(cpus, optimizer, **arguments), strict=True):
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(found[0], found[-1])


class OwnUpdate(keras.optimizers.SGD):
    """Updates the variables by own code, which may see its replica."""

    def update_step(self, gradient, variable, learning_rate):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        super().update_step(gradient * (tf.cast(replica, tf.float32) + 1.0), variable, learning_rate)


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A rate of own code."""

    def __call__(self, step):
        return tf.cast(0.1, tf.float32)


@pytest.mark.parametrize("optimizer", [OwnUpdate, lambda: keras.optimizers.SGD(OwnSchedule())])
def test_code_of_a_user_is_traced_for_each_replica(cpus, traces, optimizer):
    copies = train(cpus, optimizer)
    assert not traces
    differ = [len(values) > 1 and not np.array_equal(*values) for values in copies[:4]]
    assert any(differ) == (optimizer is OwnUpdate)


def test_a_setting_that_a_step_changes_counts(cpus, traces):
    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
        optimizer.build([variable])

    @tf.function
    def step():
        def on_replica():
            for decay in (0.5, 0.25):
                optimizer.weight_decay = decay
                optimizer.apply_gradients([(tf.zeros(3), variable)])

        strategy.run(on_replica)

    step()
    assert len(traces) == 2
    for copy in strategy.experimental_local_results(variable.value):
        np.testing.assert_array_equal(copy.numpy(), np.full(3, 0.5 * 0.75, "float32"))


def test_a_capture_that_is_no_variable_is_not_shared(cpus, traces):
    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        variable = tf.Variable(0.0, aggregation=tf.VariableAggregation.NONE)

    @tf.function
    def step():
        def on_replica():
            own = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group + 1, tf.float32) * tf.ones(())

            def add(given):
                variable.assign_add(given[0] + own)

            return shared_operations.call_shared(add, [tf.ones(())], [variable], "add")

        return strategy.run(on_replica)

    called = strategy.experimental_local_results(step())
    assert not any(bool(one) for one in called)
    assert traces == [0]
