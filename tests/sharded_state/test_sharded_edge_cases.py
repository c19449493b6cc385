"""Sharded optimizer state where a program does something unusual, against whole state."""

import keras
import numpy as np
import pytest
import sharded_models
import tensorflow as tf
from keras import optimizers

from tfdist.keras_internals.keras_symbols import TFOptimizer
from tfdist.keras_internals.sharded_optimizers import owns_whole_variables
from tfdist.sharded_state import state_sharding
from tfdist.strategies import MirroredStrategy


def assert_equal_outcomes(cpus, outcome, tolerance=2e-6, options=True):
    """Compares what `outcome` returns of a strategy with sharded state, and of one with whole state.

    Three replicas, whose sums associate differently; optimizers pass on the relative error of small gradients.
    """
    sharded, whole = (outcome(MirroredStrategy(cpus[:3], shard_optimizer_state=shards)) for shards in (options, False))
    assert sharded.keys() == whole.keys()
    for key, value in whole.items():
        np.testing.assert_allclose(sharded[key], value, rtol=tolerance, atol=tolerance, err_msg=key)


def of_steps(strategy, variables, optimizer, gradients, steps=2):
    """Returns variables and slots after updates by the tensors that `gradients` returns."""
    with strategy.scope():
        held, applied = [keras.Variable(value) for value in variables], optimizer()
        applied.build(held)
    step = tf.function(lambda: strategy.run(lambda: applied.apply(gradients(), held)), autograph=False)
    for _ in range(steps):
        step()
    return {str(number): one.numpy() for number, one in enumerate([*held, *applied.variables])}


def test_gradients_of_other_dtypes_than_their_variables(cpus):
    def gradients():
        return [tf.range(5, dtype=tf.bfloat16), tf.ones([4, 2]), tf.constant(1.0, tf.float64)]

    variables = [np.ones(5, "float32"), np.ones([4, 2], "float32"), 2.0]
    assert_equal_outcomes(cpus, lambda strategy: of_steps(strategy, variables, optimizers.Adam, gradients), 0)


@pytest.mark.long
def test_scalars_and_variables_without_values(cpus):
    variables = [1.0, np.zeros([0], "float32"), np.ones([1, 1], "float32")]

    def optimizer():
        return optimizers.AdamW(
            0.1, global_clipnorm=0.4, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2
        )

    def gradients():
        return [tf.constant(2.0), tf.zeros([0]), tf.ones([1, 1])]

    assert_equal_outcomes(cpus, lambda strategy: of_steps(strategy, variables, optimizer, gradients, steps=5))


def test_weights_that_were_frozen_get_no_average_of_others(cpus):
    model = sharded_models.compiled(
        MirroredStrategy(cpus[:2], shard_optimizer_state=True), sharded_models.OPTIMIZERS["averages"]
    )
    sharded_models.fit(model, epochs=1)
    first, last = model.layers[2], model.layers[-1]
    first.trainable = False
    model.make_train_function(force=True)
    frozen = [value.copy() for value in first.get_weights()]
    sharded_models.fit(model, epochs=1)  # at whose end weights become their averages
    averages = {slot.path: slot.numpy() for slot in model.optimizer._model_variables_moving_average}
    for before, after in zip(frozen, first.get_weights(), strict=True):
        np.testing.assert_array_equal(after, before)
    for variable in last.trainable_variables:
        (average,) = (value for path, value in averages.items() if variable.path.replace("/", "_") in path)
        np.testing.assert_array_equal(variable.numpy(), average)


@pytest.mark.long
def test_layers_that_are_frozen_and_trained_again(cpus):
    def outcome(strategy):
        model = sharded_models.compiled(strategy, lambda: optimizers.AdamW(0.01, global_clipnorm=0.1))
        for trainable in (True, False, True):
            model.layers[-1].trainable = trainable
            model.make_train_function(force=True)
            sharded_models.fit(model, epochs=1)
        return sharded_models.values(model)

    assert_equal_outcomes(cpus, outcome)


@pytest.mark.long
def test_recompiled_models_and_assigned_learning_rates(cpus):
    def outcome(strategy):
        model = sharded_models.trained(strategy, sharded_models.OPTIMIZERS["adamw"], epochs=1)
        model.optimizer.learning_rate = 0.1
        sharded_models.fit(model, epochs=1)
        for optimizer in (model.optimizer, None):
            with strategy.scope():
                model.compile(optimizer or optimizers.Lion(0.01), loss="mae")
            sharded_models.fit(model, epochs=1)
        return sharded_models.values(model)

    assert_equal_outcomes(cpus, outcome)


@pytest.mark.long
def test_assigned_and_loaded_weights_and_a_second_model_that_shares_layers(cpus, tmp_path):
    def outcome(strategy):
        model = sharded_models.trained(strategy, sharded_models.OPTIMIZERS["momentum"], epochs=1)
        model.save_weights(tmp_path / "kept.weights.h5")
        model.set_weights([0.5 * one for one in model.get_weights()])
        sharded_models.fit(model, epochs=1)
        model.load_weights(tmp_path / "kept.weights.h5")
        sharded_models.fit(model, epochs=1)
        with strategy.scope():
            other = keras.Model(model.inputs, keras.layers.Dense(1, name="other")(model.layers[-2].output))
            other.compile(optimizers.Adam(0.01), loss="mae")
        sharded_models.fit(other, epochs=1)
        sharded_models.fit(model, epochs=1)
        return sharded_models.values(model) | {f"other {key}": one for key, one in sharded_models.values(other).items()}

    assert_equal_outcomes(cpus, outcome)


@pytest.mark.long
def test_a_gradient_that_is_not_finite_skips_updates_of_all_replicas(cpus):
    def outcome(strategy):
        model = sharded_models.compiled(
            strategy,
            lambda: optimizers.LossScaleOptimizer(
                optimizers.Adam(0.01, gradient_accumulation_steps=2), initial_scale=2.0, dynamic_growth_steps=2
            ),
        )
        numbers = sharded_models.NUMBERS.copy()
        numbers[9] = np.nan
        model.fit([numbers, sharded_models.WORDS], sharded_models.TARGETS, 4, 2, verbose=0, shuffle=False)
        return sharded_models.values(model)

    assert_equal_outcomes(cpus, outcome)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [{"steps_per_execution": 3}, {"steps_per_execution": 3, "run_eagerly": True}])
def test_several_steps_in_an_execution(cpus, arguments):
    assert_equal_outcomes(
        cpus,
        lambda strategy: sharded_models.values(
            sharded_models.trained(strategy, sharded_models.OPTIMIZERS["everything"], **arguments)
        ),
    )


@pytest.mark.long
def test_a_checkpoint_that_is_restored_before_slots_exist(cpus, tmp_path):
    def outcome(strategy):
        model = sharded_models.trained(strategy, sharded_models.OPTIMIZERS["averages"])
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "checkpoint")
        other = sharded_models.compiled(strategy, sharded_models.OPTIMIZERS["averages"])
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
        sharded_models.fit(other, epochs=1)
        return sharded_models.values(other)

    assert_equal_outcomes(cpus, outcome)


class CenteredGradients(optimizers.Adam):
    def apply(self, grads, trainable_variables=None):
        centered = [one if isinstance(one, tf.IndexedSlices) else one - tf.reduce_mean(one) for one in grads]
        return super().apply(centered, trainable_variables)


@pytest.mark.long
def test_a_class_that_changes_gradients_before_keras_applies_them(cpus):
    def outcome(strategy):
        return sharded_models.values(sharded_models.trained(strategy, lambda: CenteredGradients(0.01), epochs=1))

    assert_equal_outcomes(cpus, outcome)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(optimizers, "ScheduleFreeAdamW"), reason="a Keras without ScheduleFreeAdamW")
def test_an_optimizer_that_assigns_slots_when_it_is_built(cpus):
    def outcome(strategy):
        return sharded_models.values(sharded_models.trained(strategy, lambda: optimizers.ScheduleFreeAdamW(0.1), 1))

    assert_equal_outcomes(cpus, outcome)


def test_a_worker_that_read_alone_reads_with_the_others_later(monkeypatch):
    published = {}
    monkeypatch.setattr(state_sharding.key_values, "publish", published.__setitem__)
    monkeypatch.setattr(state_sharding.key_values, "withdraw", published.pop)
    monkeypatch.setattr(state_sharding.key_values, "is_published", lambda key, seconds: key in published)
    meeting = state_sharding.Meeting("slots", 0, 2)
    with pytest.raises(RuntimeError, match="not read by all workers"):
        meeting.wait()
    assert not published  # a worker that comes later waits, and does not enter a gather without this one
    published["slots/1/1"] = "here"
    assert meeting.wait() == "slots/1/0"


def test_what_is_patched_later_is_not_a_method_of_the_class(monkeypatch):
    """Another strategy of the process may replace methods of Keras' optimizers after the first one did."""
    replaced = TFOptimizer._backend_apply_gradients
    monkeypatch.setattr(TFOptimizer, "_backend_apply_gradients", lambda *given: replaced(*given))
    assert owns_whole_variables(keras.optimizers.Adam()) is False
    assert owns_whole_variables(keras.optimizers.Lamb()) is True
