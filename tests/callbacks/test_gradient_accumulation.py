"""GradientAccumulation: schedules, flushes, remainders, errors."""

import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_strategy import FakeServers

from tfdist.callbacks import GradientAccumulation
from tfdist.strategies import MirroredStrategy

INPUTS = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)


@pytest.fixture(params=["one process", "two replicas"])
def strategy(request, cpus):
    return tf.distribute.get_strategy() if request.param == "one process" else MirroredStrategy(cpus[:2])


def mostly(name):
    """Tests one of the two strategies; `make test-long` tests both."""
    other = {"one process": "two replicas", "two replicas": "one process"}[name]
    return pytest.mark.parametrize("strategy", [name, pytest.param(other, marks=pytest.mark.long)], indirect=True)


def compiled(strategy, make_optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9), **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile(make_optimizer(), loss="mse", **arguments)
    return model


def fit(model, *callbacks, batch_size=4, samples=24, **arguments):
    data = tf.data.Dataset.from_tensor_slices((INPUTS[:samples], TARGETS[:samples])).batch(batch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`shuffle=True`|Training ended after")
        return model.fit(data, verbose=0, callbacks=list(callbacks), **arguments)


def updates(model):
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def flat(weights):
    return np.concatenate([np.ravel(weight) for weight in weights])


def test_equals_an_optimizer_with_gradient_accumulation_steps(strategy):
    ours, keras_own = compiled(strategy), compiled(
        strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)
    )  # fmt: skip
    fit(ours, GradientAccumulation(3), epochs=2)
    fit(keras_own, epochs=2)
    np.testing.assert_array_equal(flat(ours.get_weights()), flat(keras_own.get_weights()))
    assert updates(ours) == 4
    assert len(ours.optimizer.variables) == len(keras_own.optimizer.variables)
    for one, other in zip(ours.optimizer.variables, keras_own.optimizer.variables, strict=True):
        assert one.shape == other.shape, "the order is not that of an optimizer made with accumulation"


@mostly("two replicas")
def test_schedule_changes_at_epochs_and_updates_are_counted_together(strategy):
    counts = []
    model = compiled(strategy)
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: counts.append(updates(model)))
    fit(model, GradientAccumulation({0: 1, 1: 3, 3: 2}), watch, epochs=4)
    assert counts == [6, 8, 10, 13]


@mostly("one process")
def test_before_its_first_epoch_the_models_number_holds(strategy):
    counts = []
    model = compiled(strategy, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: counts.append(updates(model)))
    fit(model, GradientAccumulation({1: 6}), watch, epochs=2)
    assert counts == [3, 4]


@pytest.mark.parametrize("scaled", [pytest.param(False, marks=pytest.mark.long), True], ids=["plain", "loss scale"])
def test_a_flush_is_an_update_of_the_mean_over_the_remainder(strategy, scaled):
    def optimizer():
        inner = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
        return keras.optimizers.LossScaleOptimizer(inner) if scaled else inner

    flushed, reference = compiled(strategy, optimizer), compiled(strategy, optimizer)
    fit(flushed, GradientAccumulation(4, flush_at_end=True))  # six micro-steps: an update of four, one of two
    fit(reference, batch_size=16, samples=16)
    data = tf.data.Dataset.from_tensor_slices((INPUTS[16:], TARGETS[16:])).batch(8)
    reference.fit(data, verbose=0)
    np.testing.assert_allclose(flat(flushed.get_weights()), flat(reference.get_weights()), atol=1e-6)
    assert updates(flushed) == 2
    fit(flushed, GradientAccumulation(4))  # the accumulators were emptied, so the next update begins with them empty
    assert updates(flushed) == 3


def test_a_flush_is_an_update_that_the_strategy_runs(cpus, monkeypatch):
    strategy, counts = MirroredStrategy(cpus[:1]), []

    def run(model, update):
        before = updates(model)
        update()
        counts.append((before, updates(model)))

    monkeypatch.setattr(strategy, "run_update", run)
    fit(compiled(strategy), GradientAccumulation(4, flush_at_end=True))
    assert counts == [(1, 2)]


@mostly("one process")
def test_a_flush_comes_before_the_last_validation_and_the_average_of_weights(strategy):
    validated = []
    model = compiled(strategy, lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    watch = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: validated.append(updates(model)))
    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(8)
    fit(model, GradientAccumulation(4, flush_at_end=True), watch, validation_data=data)
    assert validated == [2]


def test_a_remainder_is_reported_and_counts_in_the_next_fit(strategy):
    model = compiled(strategy)
    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(4)
    with pytest.warns(UserWarning, match=r"after 2 of the 4 micro-steps.*flush_at_end=True"):
        model.fit(data, verbose=0, callbacks=[GradientAccumulation(4)])
    assert updates(model) == 1
    fit(model, GradientAccumulation(4))  # 2 + 6 micro-steps
    assert updates(model) == 3


@mostly("one process")
def test_no_warning_without_a_remainder(strategy):
    model = compiled(strategy)
    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, verbose=0, callbacks=[GradientAccumulation(3)])
    assert not [warning for warning in caught if "micro-steps" in str(warning.message)]


@mostly("two replicas")
def test_saved_model_is_loaded_with_accumulation(strategy, tmp_path):
    model = compiled(strategy, lambda: keras.optimizers.Adam(0.01, use_ema=True))
    fit(model, GradientAccumulation({0: 1, 1: 3}), epochs=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.gradient_accumulation_steps == 3
    for one, other in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@mostly("two replicas")
def test_turned_off_it_removes_the_accumulators(strategy, tmp_path):
    model = compiled(strategy)
    fit(model, GradientAccumulation({0: 3, 1: 1}), epochs=2)
    untouched = compiled(strategy)
    with strategy.scope():
        untouched.optimizer.build(untouched.trainable_variables)
    assert len(model.optimizer.variables) == len(untouched.optimizer.variables)
    model.save(tmp_path / "model.keras")
    assert keras.saving.load_model(tmp_path / "model.keras").optimizer.gradient_accumulation_steps is None
    tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "steps",
    [0, -1, 2.5, float("nan"), float("inf"), True, "4", None, {}, {0: 0}, {0: 2.5}, {-1: 2}, {0.5: 2}, {"0": 2}],
)
def test_steps_must_be_numbers(steps):
    with pytest.raises(ValueError, match=r"(micro-steps, or|Empty) schedule.*Received: steps=.*Expected: "):
        GradientAccumulation(steps)


def test_parameter_servers_are_rejected_with_the_remedy():
    accumulation = GradientAccumulation(2)
    accumulation.set_model(SimpleNamespace(distribute_strategy=FakeServers()))
    with pytest.raises(
        ValueError, match=r"over the network\. .*Pass `gradient_accumulation_steps` to `tfdist.strategies.Param"
    ):
        accumulation.on_train_begin()
