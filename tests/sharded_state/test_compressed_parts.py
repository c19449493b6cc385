"""Compressed gradients, and weights that are sent rounded, with sharded optimizer state."""

import keras
import numpy as np
import pytest
import sharded_models
import tensorflow as tf
from keras import optimizers

from tfdist import compression
from tfdist.compression import Policy
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.strategies import MirroredStrategy, ShardedState

ROUNDED = ShardedState(weights_dtype="bfloat16")
SIZES = (300, 1, 257)


def constant_gradients(replica):
    """Gradients of one replica, of several magnitudes."""
    random = np.random.default_rng(replica)
    return [random.normal(size=[size]).astype("float32") * 10.0**number for number, size in enumerate(SIZES)]


def summed_by_sgd(strategy, gradients, steps=1):
    """Returns the sums of gradients that a replica applies, which SGD with momentum subtracts from zeros."""
    with strategy.scope():
        variables = [keras.Variable(tf.zeros([size])) for size in SIZES]
        optimizer = optimizers.SGD(1.0, momentum=1e-30)
        optimizer.build(variables)

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.apply([tf.constant(of)[replica] for of in gradients], variables)

    run = tf.function(lambda: strategy.run(step), autograph=False)
    for _ in range(steps):
        run()
    for variable in variables:
        first, *others = (copy.numpy() for copy in variable.value.values)
        for other in others:
            np.testing.assert_array_equal(other, first)
    return [-variable.numpy() for variable in variables]


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "method", ["int8", *(pytest.param(one, marks=pytest.mark.long) for one in ("bf16", "fp16", "fp8", "int4", "sign"))]
)
def test_owners_add_up_what_replicas_have_encoded(cpus, method, replicas):
    """Against the sum of each replica's own encoding of each part."""
    policy = Policy(method, dense_below=0)
    strategy = MirroredStrategy(cpus[:replicas], shard_optimizer_state=True, compression=policy)
    given = [constant_gradients(replica) for replica in range(replicas)]
    sums = summed_by_sgd(strategy, [np.stack([one[number] for one in given]) for number in range(len(SIZES))])
    for number, size in enumerate(SIZES):
        exact = sum(one[number] for one in given)
        # A block's largest value, of which the formats have 8, 11, 4, 7 and 3 bits; "sign" keeps a mean alone.
        bits = {"bf16": 8, "fp16": 10, "fp8": 3, "int8": 6, "int4": 2, "sign": 0}[method]
        largest = sum(float(np.abs(one[number]).max()) for one in given)
        if policy.is_worthwhile("variable", [size]) and method != "sign":
            assert np.abs(sums[number] - exact).max() <= largest * 2.0**-bits
        elif method != "sign" and size > 1:
            np.testing.assert_allclose(sums[number], exact, rtol=1e-5, atol=1e-5 * largest)
    if method == "bf16":
        rounded = [sum(tf.cast(tf.cast(one[2], tf.bfloat16), tf.float32).numpy() for one in given)]
        np.testing.assert_allclose(sums[2], rounded[0], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        "topk:0.25",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("int4", "sign", "randomk:0.25", "powersgd:1")),
    ],
)
def test_sums_and_residuals_add_up_to_all_gradients(cpus, method):
    strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=True, compression=Policy(method, dense_below=0))
    given = [constant_gradients(replica) for replica in range(3)]
    steps = 3
    sums = summed_by_sgd(strategy, [np.stack([one[number] for one in given]) for number in range(3)], steps)
    residuals = [0.0] * 3
    for replica in strategy.compression_state.replicas.values():
        held = {path: entries["residual"].numpy() for path, entries in replica.entries.items() if "residual" in entries}
        for value in held.values():
            number = SIZES.index(value.size)
            residuals[number] = residuals[number] + value
    for number in range(3):
        exact = steps * sum(one[number] for one in given)
        np.testing.assert_allclose(sums[number] + residuals[number], exact, rtol=1e-4, atol=1e-4 * 10.0**number)


@pytest.mark.long
@pytest.mark.parametrize("state", [True, ShardedState(accumulators=True)], ids=str)
@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        (compression.Quantize(8), 0.15),
        (Policy("bf16", dense_steps=2), 0.15),
        (Policy({"dense": "topk:0.1", "embedding": "int8"}, dense_below=0, dense_steps=2), 1.0),
        ("powersgd:2", 0.15),
    ],
    ids=str,
)
def test_a_training_with_compression_is_close_to_one_without(cpus, method, tolerance, state):
    losses = []
    for compressor in (method, None):
        strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=state, compression=compressor)
        model = sharded_models.compiled(
            strategy,
            lambda: optimizers.LossScaleOptimizer(
                optimizers.AdamW(0.01, global_clipnorm=1.0, gradient_accumulation_steps=2), initial_scale=2.0**10
            ),
        )
        losses.append(sharded_models.fit(model, epochs=8).history["loss"])
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=tolerance)


def test_a_gradient_that_is_not_finite_changes_no_residual(cpus):
    strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=True, compression=Policy("int8", dense_below=0))
    given = [np.stack(of_replicas) for of_replicas in zip(*map(constant_gradients, range(3)), strict=True)]
    given[0][1, 5] = np.inf  # in the part of one replica alone
    summed_by_sgd(strategy, given)
    for replica in strategy.compression_state.replicas.values():
        for entries in replica.entries.values():
            assert not entries["residual"].numpy().any()


@pytest.mark.parametrize("sizes", [pytest.param((0,), marks=pytest.mark.long), (0, 1, 2000)], ids=str)
def test_variables_without_values(cpus, sizes):
    strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=True, compression="int8")
    with strategy.scope():
        variables = [keras.Variable(tf.zeros([size])) for size in sizes]
        optimizer = optimizers.SGD(1.0, momentum=0.9)
        optimizer.build(variables)
    step = tf.function(
        lambda: strategy.run(lambda: optimizer.apply([tf.ones([size]) for size in sizes], variables)), autograph=False
    )
    step()
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), -3.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "state", "share"), [("bf16", True, 0.75), (None, ROUNDED, 1.25), ("bf16", ROUNDED, 0.5)], ids=str
)
def test_bytes(cpus, method, state, share):
    strategy = MirroredStrategy(cpus[:2], shard_optimizer_state=state, compression=method)
    with strategy.scope():
        variable = keras.Variable(tf.zeros([64, 64]))
        optimizer = optimizers.Adam(0.1)
        optimizer.build([variable])
    tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.ones([64, 64])], [variable])), autograph=False)()
    sent = strategy.communication
    assert sent.dense_bytes == 4 * 64 * 64
    assert sent.wire_bytes == pytest.approx(share * sent.dense_bytes, abs=8)  # and whether values are finite


def rounded(value):
    return tf.cast(tf.cast(value, tf.bfloat16), tf.float32)


EXACT_OPTIMIZERS = {
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
    "lamb": lambda: optimizers.Lamb(0.01),
    "sgd": lambda: optimizers.SGD(0.01),
}


@pytest.mark.parametrize("name", EXACT_OPTIMIZERS)
def test_updates_are_applied_to_exact_weights(cpus, name):
    """Against one process that computes gradients of rounded weights."""
    start = np.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
    strategy = MirroredStrategy(cpus[:2], shard_optimizer_state=ROUNDED)
    with strategy.scope():
        variable, optimizer = keras.Variable(start), EXACT_OPTIMIZERS[name]()
        optimizer.build([variable])
    exact, reference = keras.Variable(start), EXACT_OPTIMIZERS[name]()
    reference.build([exact])
    step = tf.function(
        lambda: strategy.run(lambda: optimizer.apply([tf.sin(3 * variable.value) / 2], [variable])), autograph=False
    )
    for number in range(20):
        step()
        reference.apply([tf.sin(3 * (rounded(exact.value) if number else exact.value))], [exact])
        # TensorFlow computes sines and roots of eight values at a time otherwise than of single ones.
        np.testing.assert_allclose(variable.numpy(), rounded(exact.value), rtol=2**-7, atol=1e-6)
        for copy in variable.value.values:
            np.testing.assert_array_equal(copy, rounded(copy))
    (kept,) = _exact_weights(optimizer)
    np.testing.assert_allclose(kept.numpy(), exact.numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(kept.numpy() - variable.numpy()).max() > 1e-5


def _exact_weights(optimizer):
    from tfdist.keras_internals.model_state import OptimizerState

    return list(OptimizerState(optimizer).exact_weights.values())


def test_inner_optimizers_keep_exact_weights(cpus):
    with MirroredStrategy(cpus[:2], shard_optimizer_state=ROUNDED).scope():
        variable, inner = keras.Variable(tf.ones([3])), optimizers.Adam()
        outer = optimizers.MultiOptimizer(lambda variable: inner)
        outer.build([variable])
    assert len(_exact_weights(inner)) == 1
    assert not _exact_weights(outer)


def test_weights_that_a_program_assigns_replace_exact_ones(cpus):
    strategy = MirroredStrategy(cpus[:2], shard_optimizer_state=ROUNDED)
    model = sharded_models.trained(strategy, lambda: optimizers.SGD(0.0, momentum=0.9), epochs=1)
    assigned = [np.full(value.shape, 1.0 + 2**-20, "float32") for value in model.get_weights()]
    model.set_weights(assigned)
    sharded_models.fit(model, epochs=1)
    for exact in _exact_weights(model.optimizer):
        np.testing.assert_array_equal(exact.numpy(), assigned[0].flat[0])


@pytest.mark.long
def test_snapshots_hold_exact_weights(cpus):
    def model(replicas, state=ROUNDED):
        strategy = MirroredStrategy(cpus[:replicas], shard_optimizer_state=state)
        return sharded_models.trained(strategy, sharded_models.OPTIMIZERS["adamw"], epochs=1)

    saved = model(3)
    shared, per_replica, description = VariableSnapshots(TrainedModel(saved)).snapshot()
    for other in (model(2), model(2, state=True)):  # without sharding they are left out
        variables = VariableSnapshots(TrainedModel(other))
        variables.check(shared, per_replica, description)
        variables.restore_shared(shared, description)
        variables.restore_per_replica(per_replica, description)
        pairs = zip(_exact_weights(other.optimizer), _exact_weights(saved.optimizer), strict=False)
        for ours, theirs in pairs:
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
