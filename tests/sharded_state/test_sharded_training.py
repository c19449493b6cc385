"""Sharded optimizer state on the replicas of one process: the weights of whole state, split slots, bytes, refusals."""

import keras
import numpy as np
import pytest
import sharded_models
import tensorflow as tf
from keras import optimizers

from tfdist.strategies import MirroredStrategy

# The parts of a variable begin at other addresses than the variable, so TensorFlow computes other values one by one
# instead of eight at a time, where its `rsqrt` differs in the last bit. Norms are sums of parts.
_ROUNDED = {"adadelta", "adagrad", "rmsprop", "clipnorm", "global_clipnorm", "everything"}
# Others have the same kinds of slots and operations, or "everything" contains it; two workers have momentum.
_COVERED = {
    "accumulation",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "averages",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "lion",
    "momentum",
    "rmsprop",
}


def assert_equal_values(ours, theirs, tolerance=0.0):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, rtol=tolerance, atol=tolerance, err_msg=key)


def both(cpus, optimizer, **arguments):
    """Models that were trained with sharded and with whole state."""
    return [
        sharded_models.trained(MirroredStrategy(cpus, shard_optimizer_state=shards), optimizer, **arguments)
        for shards in (True, False)
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in _COVERED else name
        for name in sorted(sharded_models.OPTIMIZERS.keys() - {"resumed", "adafactor"})
    ],
)
def test_two_replicas_compute_what_they_do_with_whole_state(cpus, name):
    sharded, whole = both(cpus[:2], sharded_models.OPTIMIZERS[name])
    assert_equal_values(sharded_models.values(sharded), sharded_models.values(whole), 1e-6 if name in _ROUNDED else 0.0)


# Gradients are added up in the order of the all-reduce; norms are sums of other parts.
@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("everything", 3),
        *(pytest.param(*of, marks=pytest.mark.long) for of in [("everything", 4), ("adam", 3), ("adam", 4)]),
    ],
)
def test_more_replicas(cpus, name, replicas):
    sharded, whole = both(cpus[:replicas], sharded_models.OPTIMIZERS[name])
    assert_equal_values(
        sharded_models.values(sharded), sharded_models.values(whole), 2e-6 if name == "everything" else 0.0
    )


def test_all_replicas_have_the_same_weights(cpus):
    model = sharded_models.trained(
        MirroredStrategy(cpus[:3], shard_optimizer_state=True), sharded_models.OPTIMIZERS["adam"]
    )
    for variable in model.trainable_variables:
        first, *others = (copy.numpy() for copy in variable.value.values)
        for other in others:
            np.testing.assert_array_equal(other, first, variable.path)


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.long), 3, 4])
def test_each_replica_holds_its_part_of_the_slots(cpus, replicas):
    strategy = MirroredStrategy(cpus[:replicas], shard_optimizer_state=True)
    model = sharded_models.compiled(strategy, sharded_models.OPTIMIZERS["averages"])
    model.optimizer.build(model.trainable_variables)
    owned = sharded_models.owned_values(model)
    assert sum(owned) == 2 * model.count_params()
    assert max(owned) <= 1.05 * sum(owned) / replicas


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(of, marks=pytest.mark.long) for of in ("float16", "float64"))]
)
def test_other_dtypes(cpus, dtype):
    def trained(shards):
        strategy = MirroredStrategy(cpus[:2], shard_optimizer_state=shards)
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype=dtype)])
            model.add(keras.layers.Dense(1))
            model.compile(optimizers.SGD(0.1, momentum=0.9), loss="mse")
        model.fit(sharded_models.NUMBERS, sharded_models.TARGETS, 8, 1, verbose=0, shuffle=False)
        return sharded_models.values(model)

    assert_equal_values(trained(True), trained(False))


def dense_model(strategy, optimizer, **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(units, activation="tanh") for units in (300, 701, 1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(optimizer(0.01), loss="mse", **arguments)
    model.fit(sharded_models.NUMBERS, sharded_models.TARGETS, 8, 1, verbose=0, shuffle=False)
    return model


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("replicas", [3, pytest.param(4, marks=pytest.mark.long)])
def test_sums_of_several_buckets_have_the_bits_of_an_all_reduce(cpus, replicas, dtype):
    """The large variable is sent in two tensors, each of which the ring reduces in chunks."""
    sizes = (9001, 1500, 541503, 701, 1)
    random = np.random.default_rng(0)
    gradients = [random.normal(size=[replicas, size]).astype("float32") for size in sizes]

    def outcome(shards):
        strategy = MirroredStrategy(cpus[:replicas], shard_optimizer_state=shards)
        with strategy.scope():
            variables = [keras.Variable(tf.zeros([size]), dtype=dtype) for size in sizes]
            optimizer = optimizers.SGD(1.0, momentum=0.9)
            optimizer.build(variables)

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.apply([tf.cast(tf.constant(of)[replica], dtype) for of in gradients], variables)

        tf.function(lambda: strategy.run(step), autograph=False)()
        return {str(index): np.asarray(tf.cast(one, tf.float32)) for index, one in enumerate(variables)}

    assert_equal_values(outcome(True), outcome(False))


@pytest.mark.parametrize(
    ("replicas", "jit_compile"),
    [(2, "auto"), *(pytest.param(*of, marks=pytest.mark.long) for of in [(2, True), (3, "auto"), (4, "auto")])],
)
def test_updates_of_large_variables_and_bytes(cpus, replicas, jit_compile):
    """Of 213,502 parameters. Two replicas have equal bits; matrix products of more round otherwise in other graphs."""
    strategies = [MirroredStrategy(cpus[:replicas], shard_optimizer_state=shards) for shards in (True, False)]
    models = [dense_model(strategy, optimizers.Adam, jit_compile=jit_compile) for strategy in strategies]
    assert_equal_values(*map(sharded_models.values, models), 0.0 if replicas == 2 else 1e-7)
    sharded, whole = (strategy.communication for strategy in strategies)
    # An all-reduce, and a gather of half of its bytes, in which vectors are filled up to a multiple of the replicas.
    assert sharded.wire_bytes == pytest.approx(1.5 * whole.wire_bytes, rel=1e-4)
    assert (sharded.updates, sharded.dense_bytes) == (whole.updates, whole.dense_bytes)


def test_an_optimizer_without_slots_sums_everywhere(cpus):
    strategy = MirroredStrategy(cpus[:2], shard_optimizer_state=True)
    dense_model(strategy, optimizers.SGD)
    assert strategy.communication.wire_bytes == strategy.communication.dense_bytes


def test_updates_of_some_variables(cpus):
    """A custom loop that updates other variables in each step."""

    def outcome(shards):
        strategy = MirroredStrategy(cpus[:3], shard_optimizer_state=shards)
        with strategy.scope():
            variables = [keras.Variable(tf.ones([size])) for size in (5, 1, 7, 4)]
            optimizer = optimizers.Adam(0.1)
            optimizer.build(variables)

        def step(chosen, scale):
            gradients = [scale * tf.range(1.0, 1.0 + variables[one].shape[0]) for one in chosen]
            optimizer.apply(gradients, [variables[one] for one in chosen])

        run = tf.function(lambda chosen, scale: strategy.run(step, args=(chosen, scale)), autograph=False)
        for chosen in ((0, 2), (1,), (3, 2, 1, 0), (2,)):
            run(chosen, tf.constant(0.5))
        return {str(index): variable.numpy() for index, variable in enumerate([*variables, *optimizer.variables])}

    assert_equal_values(outcome(True), outcome(False), 1e-6)


def test_an_invalid_argument_is_refused(cpus):
    with pytest.raises(ValueError, match="Invalid `shard_optimizer_state`. Received: 'yes'"):
        MirroredStrategy(cpus[:2], shard_optimizer_state="yes")


def test_a_slot_is_not_read_within_a_function(cpus):
    model = sharded_models.trained(
        MirroredStrategy(cpus[:2], shard_optimizer_state=True), sharded_models.OPTIMIZERS["momentum"], epochs=1
    )
    slot = model.optimizer.variables[-1]
    with pytest.raises(RuntimeError, match="cannot be read within a function.*Received: .*Expected: a read outside"):
        tf.function(lambda: slot + 1.0)()


def test_a_value_of_another_shape_is_refused(cpus):
    model = sharded_models.trained(
        MirroredStrategy(cpus[:2], shard_optimizer_state=True), sharded_models.OPTIMIZERS["momentum"], epochs=1
    )
    with pytest.raises(ValueError, match=r"shapes of a variable and its new value differ. Received: \(3,\)"):
        model.optimizer.variables[-1].assign([1.0, 2.0, 3.0])
