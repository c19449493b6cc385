"""Sums of gradients that are split over the replicas, as in stage 2 of ZeRO."""

import keras
import numpy as np
import pytest
import sharded_models
import tensorflow as tf
from keras import optimizers
from test_sharded_edge_cases import assert_equal_outcomes

from tfdist.callbacks import FailureRecovery, GradientAccumulation
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.strategies import MirroredStrategy, ShardedState

SPLIT = ShardedState(accumulators=True)


def without_accumulators(model):
    """The weights and slots; accumulators are whole on one side, where they are the first replica's."""
    own = {id(one) for one in getattr(model.optimizer, "inner_optimizer", model.optimizer)._accumulated_gradients}
    slots = [one for one in model.optimizer.variables if id(one) not in own]
    return {str(number): one.numpy() for number, one in enumerate([*model.trainable_variables, *slots])}


def scaled():
    return optimizers.LossScaleOptimizer(optimizers.Adam(0.01, gradient_accumulation_steps=2), initial_scale=2.0**127)


OPTIMIZERS = {
    "everything": sharded_models.OPTIMIZERS["everything"],
    "loss_scale": scaled,
    "no slots": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3),
    "whole": lambda: optimizers.Lamb(0.01, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize(
    "name",
    ["everything", *(pytest.param(name, marks=pytest.mark.long) for name in ("whole", "loss_scale", "no slots"))],
)
def test_weights_and_slots_equal_those_of_whole_sums(cpus, name):
    def outcome(strategy):
        model = sharded_models.compiled(strategy, OPTIMIZERS[name])
        inputs = [sharded_models.NUMBERS[:19], sharded_models.WORDS[:19]]  # the last batch has one replica's samples
        model.fit(inputs, sharded_models.TARGETS[:19], 6, 2, verbose=0, shuffle=False)
        return without_accumulators(model)

    assert_equal_outcomes(cpus, outcome, options=SPLIT)


@pytest.mark.long
@pytest.mark.parametrize("flush_at_end", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_rest_of_an_update(cpus, flush_at_end):
    def outcome(strategy):
        model = sharded_models.compiled(strategy, lambda: optimizers.Adam(0.01))
        for _ in range(2):
            sharded_models.fit(model, epochs=1, callbacks=[GradientAccumulation(2, flush_at_end=flush_at_end)])
        return without_accumulators(model)

    with np.testing.suppress_warnings() as warnings:
        warnings.filter(UserWarning)  # of micro-steps that are not applied
        assert_equal_outcomes(cpus, outcome, options=SPLIT)


def accumulating(strategy, steps=2):
    """A model after three micro-steps."""
    model = sharded_models.compiled(strategy, lambda: optimizers.Adam(0.01, gradient_accumulation_steps=steps))
    sharded_models.fit(model, epochs=1)
    return model


def held_bytes(model):
    """The bytes of accumulators on each replica."""
    held = [0, 0, 0]
    for one in model.optimizer._accumulated_gradients:
        parts = one.parts if hasattr(one, "parts") else one.value.values
        for replica, part in enumerate(parts):
            held[replica] += 4 * part.shape.num_elements()
    return held


def test_a_replica_holds_its_part_of_the_sums(cpus):
    held = []
    for state in (SPLIT, True):
        strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=state)
        model = sharded_models.compiled(strategy, lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2))
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        held.append(held_bytes(model))
    assert held == [[4 * 149] * 3, [4 * 447] * 3]


@pytest.mark.long
def test_split_sums_need_the_gradients_of_every_micro_step(cpus):
    split, whole = (accumulating(MirroredStrategy(cpus[:3], shard_optimizer_state=state)) for state in (SPLIT, True))
    sent = [model.distribute_strategy.communication.wire_bytes for model in (split, whole)]
    assert sent[0] > sent[1]


@pytest.mark.long
def test_a_file_and_a_checkpoint_hold_the_sums_over_all_replicas(cpus, tmp_path):
    strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=SPLIT)
    model = accumulating(strategy)
    sums = [one.numpy() for one in model.optimizer._accumulated_gradients]
    assert any(one.any() for one in sums)
    model.save(tmp_path / "split.keras")
    plain = keras.models.load_model(tmp_path / "split.keras")
    for ours, theirs in zip(sums, plain.optimizer._accumulated_gradients, strict=True):
        np.testing.assert_array_equal(theirs.numpy(), ours)
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(tmp_path / "checkpoint")
    other = accumulating(MirroredStrategy(cpus[:2], shard_optimizer_state=SPLIT))
    tf.train.Checkpoint(optimizer=other.optimizer).restore(path).assert_consumed()
    for ours, theirs in zip(sums, other.optimizer._accumulated_gradients, strict=True):
        np.testing.assert_array_equal(theirs.numpy(), ours)


def restored(model, other):
    ours, theirs = VariableSnapshots(TrainedModel(model)), VariableSnapshots(TrainedModel(other))
    shared, per_replica, description = ours.snapshot()
    theirs.check(shared, per_replica, description)
    theirs.restore_shared(shared, description)
    theirs.restore_per_replica(per_replica, description)
    return other


@pytest.mark.parametrize(
    ("replicas", "steps", "factor"),
    [pytest.param(2, 2, 1.0, marks=pytest.mark.long), (2, 4, 2.0)],
    ids=["2 micro-steps", "4 micro-steps"],
)
def test_snapshots_resume_an_unfinished_update(cpus, replicas, steps, factor):
    model = accumulating(MirroredStrategy(cpus[:3], shard_optimizer_state=SPLIT))
    other = accumulating(MirroredStrategy(cpus[:replicas], shard_optimizer_state=SPLIT), steps)
    restored(model, other)
    pairs = zip(model.optimizer._accumulated_gradients, other.optimizer._accumulated_gradients, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(theirs.numpy(), factor * ours.numpy(), rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("is_split", [True, False])
def test_whole_sums_of_an_unfinished_update_are_not_split(cpus, is_split):
    states = [SPLIT, True] if is_split else [True, SPLIT]
    saved, present = (accumulating(MirroredStrategy(cpus[:3], shard_optimizer_state=state)) for state in states)
    with pytest.raises(ValueError, match="sums of gradients of an unfinished update are. Received: "):
        restored(saved, present)
    sharded_models.fit(saved, epochs=1)  # six micro-steps: the update is complete
    restored(saved, present)
    for one in present.optimizer._accumulated_gradients:
        assert not one.numpy().any()


class Stop(keras.callbacks.Callback):
    """Ends `fit` within an update."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer._iterations.numpy()) == 5:
            raise InterruptedError


@pytest.mark.long
def test_recovery_on_another_number_of_replicas(cpus, tmp_path):
    reference = accumulating(MirroredStrategy(cpus[:3], shard_optimizer_state=SPLIT))
    sharded_models.fit(reference, epochs=1)
    model = sharded_models.compiled(
        MirroredStrategy(cpus[:3], shard_optimizer_state=SPLIT),
        lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    )
    with pytest.raises(InterruptedError):
        sharded_models.fit(model, callbacks=[Stop(), FailureRecovery(tmp_path, every_steps=1)])
    resumed = sharded_models.compiled(
        MirroredStrategy(cpus[:2], shard_optimizer_state=SPLIT),
        lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    )
    sharded_models.fit(resumed, callbacks=[FailureRecovery(tmp_path)])
    theirs = without_accumulators(reference)
    for key, value in without_accumulators(resumed).items():  # the sums of two and three numbers associate differently
        np.testing.assert_allclose(value, theirs[key], rtol=2e-5, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("options", [{"accumulators": 1}, {"weights_dtype": "float16"}])
def test_invalid_options_are_refused(options):
    with pytest.raises(ValueError, match="of a ShardedState. Received: .*Expected: "):
        ShardedState(**options)
