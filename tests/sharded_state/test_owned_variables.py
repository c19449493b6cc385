"""Optimizers that cannot update parts of variables: each replica owns whole variables."""

import keras
import numpy as np
import pytest
import sharded_models
import tensorflow as tf
from keras import optimizers
from test_sharded_edge_cases import assert_equal_outcomes

from tfdist.compression import Policy
from tfdist.sharded_state.layout import SpanLayout
from tfdist.strategies import MirroredStrategy


class OwnUpdate(optimizers.SGD):
    """Uses the norm of a variable, as no part of it could."""

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momentums[self._get_variable_index(variable)]
        self.assign(momentum, momentum * 0.5 + gradient / (tf.norm(gradient) + 0.1))
        variable.assign_sub(learning_rate * momentum.value * tf.norm(variable))


KINDS = {"lamb": optimizers.Lamb, "adafactor": optimizers.Adafactor, "muon": optimizers.Muon, "nadam": optimizers.Nadam}
PLAIN = {name: lambda kind=kind: kind(0.01) for name, kind in KINDS.items()}
EVERYTHING = {
    name: lambda kind=kind: kind(
        0.01,
        weight_decay=0.1,
        global_clipnorm=0.2,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=2,
    )
    for name, kind in KINDS.items()
}


def trained(strategy, optimizer, **arguments):
    return sharded_models.values(sharded_models.trained(strategy, optimizer, **arguments))


@pytest.mark.parametrize(
    "name", [name if name == "adafactor" else pytest.param(name, marks=pytest.mark.long) for name in KINDS]
)
def test_all_features_compute_what_they_do_with_whole_state(cpus, name):
    assert_equal_outcomes(cpus, lambda strategy: trained(strategy, EVERYTHING[name]))


@pytest.mark.parametrize(
    "arguments", [{"run_eagerly": True}, pytest.param({"jit_compile": True}, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in KINDS])
def test_eager_and_compiled_updates(cpus, name, arguments):
    assert_equal_outcomes(cpus, lambda strategy: trained(strategy, PLAIN[name], epochs=1, **arguments))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in KINDS])
def test_loss_scales(cpus, name):
    def optimizer():
        return optimizers.LossScaleOptimizer(PLAIN[name](), initial_scale=2.0**127)

    assert_equal_outcomes(cpus, lambda strategy: trained(strategy, optimizer))


@pytest.mark.long
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_update_of_a_subclass(cpus, run_eagerly):
    assert_equal_outcomes(
        cpus, lambda strategy: trained(strategy, lambda: OwnUpdate(0.1, momentum=0.5), run_eagerly=run_eagerly)
    )


def multi_optimizer():
    dense, others = optimizers.Adam(0.01, use_ema=True), optimizers.Lamb(0.1)
    return optimizers.MultiOptimizer(lambda variable: dense if "dense" in variable.path else others)


@pytest.mark.long
def test_optimizers_of_a_multi_optimizer(cpus):
    split = []

    def outcome(strategy):
        model = sharded_models.trained(strategy, multi_optimizer, epochs=1)
        split.extend(slot for slot in model.optimizer.variables if hasattr(slot, "parts"))
        return sharded_models.values(model)

    assert_equal_outcomes(cpus, outcome)
    assert len(split) == 3 * 4 + 2  # moments and averages of two layers, and moments of the embedding


def test_slots_exist_where_they_are_owned_and_are_balanced(cpus):
    strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=True)
    model = sharded_models.compiled(strategy, EVERYTHING["adafactor"])
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    slots = [slot for slot in model.optimizer.variables if hasattr(slot, "parts")]
    for slot in slots:
        held = [part.shape for part in slot.parts if part.shape.num_elements()]
        assert held == [slot.shape]
    factors = [slot for slot in slots if slot.name.endswith(("kernel", "embeddings"))]
    assert len(factors) == 6  # two of each matrix


@pytest.mark.long
def test_a_file_has_whole_slots(cpus, tmp_path):
    model = sharded_models.trained(MirroredStrategy(cpus[:3], shard_optimizer_state=True), PLAIN["adafactor"])
    model.save(tmp_path / "sharded.keras")
    plain = keras.models.load_model(tmp_path / "sharded.keras")
    ours, theirs = sharded_models.values(model), sharded_models.values(plain)
    assert {key: value.tolist() for key, value in theirs.items()} == {key: ours[key].tolist() for key in theirs}
    with MirroredStrategy(cpus[:2], shard_optimizer_state=True).scope():
        again = keras.models.load_model(tmp_path / "sharded.keras")
    for key, value in sharded_models.values(again).items():
        np.testing.assert_array_equal(value, ours[key], key)


def test_a_layout_of_whole_variables_is_balanced():
    sizes = [7, 100, 3, 50, 50, 1, 0, 40, 30]
    layout = SpanLayout.plan_whole([tf.TensorSpec([size]) for size in sizes], 3, 0)
    loads = [sum(span[replica].size for span in map(layout.spans, range(len(sizes)))) for replica in range(3)]
    assert sum(loads) == sum(sizes)
    assert max(loads) == 100


@pytest.mark.parametrize("sizes", [[600, 500, 400], [900, 10, 5]], ids=["balanced", "one large variable"])
def test_bytes(cpus, sizes):
    strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=True)
    with strategy.scope():
        variables = [keras.Variable(tf.ones([size])) for size in sizes]
        optimizer = optimizers.Lamb(0.1)
        optimizer.build(variables)
    step = tf.function(
        lambda: strategy.run(lambda: optimizer.apply([tf.ones([size]) for size in sizes], variables)), autograph=False
    )
    step()
    # An all-reduce; then parts that are filled up to the longest one or, if that is shorter, another all-reduce.
    padded, summed = 4 * 2 * 2 * max(sizes), 4 * 2 * 2 * (2 / 3) * sum(sizes)
    assert strategy.communication.wire_bytes == pytest.approx((summed + min(padded, summed)) / 2, abs=8)


def test_bytes_of_compressed_gradients(cpus):
    strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=True, compression=Policy("bf16", dense_below=0))
    sizes = [900, 10, 6]
    with strategy.scope():
        variables = [keras.Variable(tf.ones([size])) for size in sizes]
        optimizer = optimizers.Lamb(0.1)
        optimizer.build(variables)
    step = tf.function(
        lambda: strategy.run(lambda: optimizer.apply([tf.ones([size]) for size in sizes], variables)), autograph=False
    )
    step()
    # Two all-reduces, of 2 and of 4 bytes a value, as one replica owns nearly all; a few bytes for complete blocks.
    assert strategy.communication.wire_bytes == pytest.approx(2 * (2 / 3) * (2 + 4) * sum(sizes), abs=32)


class SharedState(optimizers.Adam):
    """Adds up what the gradients of all variables contribute."""

    def build(self, variables):
        super().build(variables)
        self.total = self.add_variable((), name="total")

    def update_step(self, gradient, variable, learning_rate):
        self.total.assign_add(tf.reduce_sum(gradient))
        super().update_step(gradient, variable, learning_rate)


class OtherSlots(optimizers.Adam):
    """Uses a slot of another variable."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * tf.reduce_sum(self._momentums[0].value))


class OwnClipping(optimizers.Adam):
    """Clips in another way."""

    def _clip_gradients(self, gradients):
        return gradients


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (SharedState, r"an update by SharedState that changes .*total.* belongs to no variable"),
        (OtherSlots, r"an update of another variable that uses the slot .*momentum"),
        (OwnClipping, r"OwnClipping, which defines _clip_gradients: clipping, which needs"),
    ],
)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_optimizer_that_cannot_be_split_is_refused(cpus, optimizer, reason, run_eagerly):
    strategy = MirroredStrategy(cpus[:2], shard_optimizer_state=True)
    model = sharded_models.compiled(strategy, optimizer, run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match=reason + ".*Expected: .*Create the strategy without"):
        sharded_models.fit(model)
