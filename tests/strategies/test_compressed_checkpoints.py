"""The state of compression under MirroredStrategy: saved, restored into new strategies, and of models that are gone."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import MomentumCorrection, Policy, TopK
from tfdist.strategies import MirroredStrategy

INPUTS = np.random.default_rng(0).normal(size=(32, 40)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(32, 24)).astype("float32")
POLICIES = {
    "powersgd": lambda: Policy("powersgd:2", dense_below=0, dense_steps=1),
    "momentum": lambda: Policy(MomentumCorrection(TopK(0.1, 20)), dense_below=0),
}


def compiled(strategy, units=24):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(units, name="only")], name="model")
        model.compile(keras.optimizers.SGD(0.05), loss="mse")
    return model


def fit(model):
    targets = TARGETS[:, : model.output_shape[-1]]
    model.fit(tf.data.Dataset.from_tensor_slices((INPUTS, targets)).batch(16), verbose=0)


def checkpoint_of(strategy, model):
    return tf.train.Checkpoint(model=model, compression=strategy.compression_state)


def entries(strategy, name):
    return [
        replica.entries["model/only/kernel"][name].numpy() for replica in strategy.compression_state.replicas.values()
    ]


# Other tests, of this file and of tests/recovery, restore PowerSGD.
@pytest.mark.parametrize("name", [pytest.param("powersgd", marks=pytest.mark.long), "momentum"])
def test_training_goes_on_as_if_it_had_not_been_interrupted(cpus, name, tmp_path):
    strategy = MirroredStrategy(cpus[:2], compression=POLICIES[name]())
    model = compiled(strategy)
    fit(model)
    prefix = checkpoint_of(strategy, model).save(tmp_path / "state")
    fit(model)
    for when in ("before the first step", "after it"):
        other_strategy = MirroredStrategy(cpus[:2], compression=POLICIES[name]())
        other = compiled(other_strategy)
        if when == "after it":
            fit(other)
        status = checkpoint_of(other_strategy, other).restore(prefix)
        fit(other)
        status.assert_existing_objects_matched()
        for weight, expected in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(weight, expected, when)


@pytest.mark.parametrize(
    ("old", "new", "when"), [pytest.param(2, 3, "before the first step", marks=pytest.mark.long), (3, 1, "after it")]
)
def test_another_number_of_replicas_takes_the_residuals_over(cpus, old, new, when, tmp_path):
    strategy = MirroredStrategy(cpus[:old], compression=POLICIES["powersgd"]())
    model = compiled(strategy)
    fit(model)
    fit(model)
    prefix = checkpoint_of(strategy, model).save(tmp_path / "state")
    other_strategy = MirroredStrategy(cpus[:new], compression=POLICIES["powersgd"]())
    other = compiled(other_strategy)
    if when == "after it":
        fit(other)
    tf.train.Checkpoint(model=other).restore(prefix).expect_partial()
    other_strategy.compression_state.restore([prefix])
    if when == "before the first step":
        # Inputs of zeros, and the bias for targets: what a step without gradients delivers are residuals.
        assert not other_strategy.compression_state.replicas
        other.train_on_batch(np.zeros_like(INPUTS[:12]), np.broadcast_to(other.get_weights()[1], [12, 24]))
        delivered = model.get_weights()[0] - other.get_weights()[0]
        kept = np.sum(entries(other_strategy, "residual"), axis=0)
        assert np.abs(delivered).max() > 0
        # Weights of about 0.1 have a last place of 1e-8, and the rate was 0.05.
        np.testing.assert_allclose(delivered / 0.05 + kept, np.sum(entries(strategy, "residual"), axis=0), atol=2e-6)
        return
    sums = [np.sum(entries(s, "residual"), axis=0) for s in (strategy, other_strategy)]
    # Two or three numbers below 1, added in another order.
    np.testing.assert_allclose(sums[1], sums[0], atol=1e-6)
    for factor in entries(other_strategy, "factor"):
        np.testing.assert_array_equal(factor, entries(strategy, "factor")[0])


@pytest.mark.parametrize("units", [24, pytest.param(16, marks=pytest.mark.long)])
def test_models_with_variables_of_one_path_have_states_of_their_own(cpus, units):
    """Two at the same time, and one after them, to which they leave no residuals."""
    strategy = MirroredStrategy(cpus[:2], compression=POLICIES["momentum"]())
    models = [compiled(strategy), compiled(strategy)]
    for model in models:
        fit(model)
    weights = {24: [model.get_weights()[0] for model in models]}
    del model, models
    keras.backend.clear_session()
    gc.collect()
    next_one = compiled(strategy, units)
    fit(next_one)
    weights.setdefault(units, []).append(next_one.get_weights()[0])
    for number, kernels in weights.items():
        alone = compiled(MirroredStrategy(cpus[:2], compression=POLICIES["momentum"]()), number)
        fit(alone)
        for kernel in kernels:
            np.testing.assert_array_equal(kernel, alone.get_weights()[0])
