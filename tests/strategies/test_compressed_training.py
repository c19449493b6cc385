"""Compression under MirroredStrategy: exchanges against NumPy, state, bad numbers, accumulation, buckets, bytes."""

import exchange_model
import keras
import numpy as np
import pytest
import tensorflow as tf
from exchange_model import SHAPES, STEPS, Exchanges, gradient
from exchange_references import differences

from tfdist.compression import MomentumCorrection, Policy, Quantize, TopK
from tfdist.strategies import MirroredStrategy

INPUTS = np.random.default_rng(0).normal(size=(32, 40)).astype("float32")
TARGETS = INPUTS[:, :24] @ np.eye(24, 8, dtype="float32")
# A sum of four values and the rounding of float32; PowerSGD's Gram matrix squares a condition of some tens.
TOLERANCE = 1e-6
TOLERANCE_LOW_RANK = 1e-4


def compiled(strategy, optimizer=lambda: keras.optimizers.SGD(0.05), dtype=None, **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(8, dtype=dtype)])
        model.compile(optimizer(), loss="mse", **arguments)
    return model


def fit(model, batch_size=16, epochs=1, inputs=INPUTS, targets=TARGETS, **arguments):
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(batch_size)
    return model.fit(data, epochs=epochs, verbose=0, **arguments)


def replicas_agree(strategy, model):
    return all(
        np.array_equal(strategy.experimental_local_results(variable.value)[0], local)
        for variable in model.trainable_variables
        for local in strategy.experimental_local_results(variable.value)
    )


def states(strategy):
    return {
        f"{number}:{path}:{name}": variable.numpy().copy()
        for number, replica in strategy.compression_state.replicas.items()
        for path, entries in replica.entries.items()
        for name, variable in entries.items()
    }


# Also in tests/compression/test_exchange.py, and with two and three workers in test_compression_on_workers.py.
LONG = pytest.mark.long


@pytest.mark.parametrize("size", [pytest.param(2, marks=LONG), 3, pytest.param(4, marks=LONG)])
def test_every_method_equals_numpy_on_real_collectives(cpus, size):
    strategy = MirroredStrategy(cpus[:size], compression=exchange_model.policy())
    exchanges = Exchanges(strategy)
    steps = [exchanges.sums(gradient, step) for step in range(STEPS)]
    for sums in steps:
        for name, local in sums.items():
            assert all(np.array_equal(local[0], other) for other in local), f"replicas differ in {name}"
    delivered = [{name: local[0] for name, local in sums.items()} for sums in steps]
    apart, residuals = differences(delivered, lambda name, step: [gradient(name, r, step) for r in range(size)])
    for name, difference in apart.items():
        assert difference < (TOLERANCE_LOW_RANK if name == "powersgd" else TOLERANCE), (name, difference)
    ours = exchanges.state()
    assert set(ours) == set(range(size))
    for replica, by_name in ours.items():
        assert set(by_name) == set(SHAPES) - {"bf16", "bias"}
        for name, residual in by_name.items():
            off = np.sort(np.abs(residual - residuals[name][replica]), axis=None)[:-2]
            assert off.max() < (TOLERANCE_LOW_RANK if name == "powersgd" else TOLERANCE) * 10 * size, (name, off.max())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)])
def test_bytes_that_the_strategy_reports(cpus, size):
    methods = {"first": "int8", "second": "powersgd:4", "third": "topk:0.01"}
    strategy = MirroredStrategy(cpus[:size], compression=Policy(methods))
    with strategy.scope():
        layers = [keras.layers.Dense(400, name=name, use_bias=name == "last") for name in (*methods, "last")]
        model = keras.Sequential([keras.Input((400,)), *layers])
        model.compile(keras.optimizers.SGD(0.01), loss="mse")
    fit(model, 16, inputs=np.ones([32, 400], "float32"), targets=np.ones([32, 400], "float32"))
    counts = strategy.communication_by_method
    twice = 2 * 2 * (size - 1) / size  # steps, and what an all-reduce sends
    for name, method in methods.items():
        compressor = Policy(method).compressor_for(name).compressor
        copies = 2 * (size - 1) if name == "third" else twice
        expected = copies * compressor.payload_bytes((400, 400))
        assert 0.98 * expected <= counts[repr(compressor)].wire_bytes <= 1.02 * expected, name
        # Each step's bytes are whole numbers.
        assert abs(counts[repr(compressor)].dense_bytes - twice * 4 * 400 * 400) <= 2
    assert abs(counts["uncompressed"].wire_bytes - twice * 4 * 401 * 400) <= 2
    communication = strategy.communication
    assert communication.wire_bytes == sum(count.wire_bytes for count in counts.values())
    assert communication.dense_bytes == sum(count.dense_bytes for count in counts.values())


@pytest.mark.long  # momentum correction warms up, too
def test_the_first_steps_are_those_of_the_dense_strategy(cpus):
    weights = {}
    for name, compression in {"dense": None, "warm-up": Policy("sign", dense_steps=2, dense_below=0)}.items():
        model = compiled(MirroredStrategy(cpus[:2], compression=compression))
        weights[name] = []
        for _ in range(2):
            fit(model)  # two steps
            weights[name].append(model.get_weights())
    for dense, warm in zip(*(weights[name][0] for name in ("dense", "warm-up")), strict=True):
        np.testing.assert_array_equal(dense, warm)
    assert np.abs(weights["dense"][1][0] - weights["warm-up"][1][0]).max() > 1e-4


def weights_of_momentum(cpus, dense_below=0, **arguments):
    """Those of momentum SGD, and those of a momentum correction that is still in its warm-up."""
    policy = Policy(MomentumCorrection(TopK(0.1, 20), 0.9), dense_steps=4, dense_below=dense_below)
    for compression, momentum in ((None, 0.9), (policy, 0.0)):
        strategy = MirroredStrategy(cpus[:2], compression=compression)
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(8, **arguments)])
            model.compile(keras.optimizers.SGD(0.05, momentum), loss="mse")
        fit(model, epochs=2)
        yield model.get_weights()


@pytest.mark.long  # the next test has a compressed variable, too
def test_momentum_correction_warms_up_like_momentum_sgd(cpus):
    for plain, corrected in zip(*weights_of_momentum(cpus, use_bias=False), strict=True):
        # Keras multiplies the velocity by the rate before it adds it up: other roundings of numbers around 1.
        np.testing.assert_allclose(plain, corrected, atol=1e-6)


def test_momentum_correction_gives_momentum_to_small_variables_too(cpus):
    for plain, corrected in zip(*weights_of_momentum(cpus, dense_below=100), strict=True):
        np.testing.assert_allclose(plain, corrected, atol=1e-6)


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=LONG), 2])
def test_accumulation_exchanges_once_an_update(cpus, steps_per_execution):
    strategy = MirroredStrategy(cpus[:2], compression=Policy("int8", dense_below=0))
    model = compiled(
        strategy,
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4),
        steps_per_execution=steps_per_execution,
    )
    fit(model, batch_size=4)  # eight micro-steps
    communication = strategy.communication
    assert (communication.gradient_collectives, communication.updates) == (2, 2)
    assert communication.dense_bytes == 2 * 4 * model.count_params()
    assert communication.wire_bytes == 2 * (2 * 260 + 8 * 4)  # of two blocks and the bias
    assert replicas_agree(strategy, model)


@pytest.mark.long  # the accumulation has several steps a call
def test_eager_and_traced_and_several_steps_a_call_compute_the_same(cpus):
    weights = []
    for arguments in ({}, {"run_eagerly": True}, {"steps_per_execution": 3}):
        strategy = MirroredStrategy(cpus[:2], compression=Policy("int8", dense_below=0))
        model = compiled(strategy, **arguments)
        fit(model, batch_size=12)  # the last of three batches has eight samples
        assert replicas_agree(strategy, model)
        weights.append(np.concatenate([weight.ravel() for weight in model.get_weights()]))
    # Rounded to 127 levels: where a gradient differs in its last place a value may go to the other level.
    for other in weights[1:]:
        np.testing.assert_allclose(weights[0], other, atol=0.05 * 3 * 2 / 127)
        assert np.isclose(weights[0], other, atol=1e-6).mean() > 0.99


def test_a_replica_without_samples_adds_nothing(cpus):
    strategy = MirroredStrategy(cpus[:3], compression=Policy(Quantize(8, 8), dense_below=0))
    model = compiled(strategy)
    fit(model, batch_size=3, inputs=INPUTS[:4], targets=TARGETS[:4])  # the last batch has one sample for three
    assert replicas_agree(strategy, model)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert all(np.isfinite(value).all() for value in states(strategy).values())


def test_an_overflow_skips_the_update_and_nothing_is_remembered(cpus):
    strategy = MirroredStrategy(cpus[:2], compression=Policy("int8", dense_below=0))

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0)

    model = compiled(strategy, scaled)
    fit(model)
    before, weights = states(strategy), model.get_weights()
    unscaled = MirroredStrategy(cpus[:2], compression=Policy("int8", dense_below=0))
    plain = compiled(unscaled)
    fit(plain)
    # A power of two rounds nothing, so neither weights nor residuals depend on it.
    np.testing.assert_equal(list(before.values()), list(states(unscaled).values()))
    np.testing.assert_equal(weights, plain.get_weights())

    bad = INPUTS[:16].copy()
    bad[-1, 3] = np.inf  # on the last replica
    fit(model, inputs=bad, targets=TARGETS[:16])
    np.testing.assert_equal(states(strategy), before)
    for weight, kept in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, kept)
    assert float(model.optimizer.dynamic_scale.numpy()) == 32.0
    fit(model)
    assert replicas_agree(strategy, model)
    assert np.isfinite(model.get_weights()[0]).all() and not np.array_equal(model.get_weights()[0], weights[0])


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.long), "mixed_float16"])
def test_short_variables_and_mixed_precision(cpus, dtype):
    strategy = MirroredStrategy(cpus[:2], compression=Policy("int8", dense_below=0))
    model = compiled(strategy, dtype=dtype)
    losses = fit(model, epochs=3).history["loss"]
    assert losses[-1] < losses[0]
    assert replicas_agree(strategy, model)
    assert {value.dtype for value in states(strategy).values()} == {np.dtype("float32")}


@pytest.mark.parametrize("compression", ["gzip", 5, {"kernel": "topk:7"}])
def test_an_invalid_compression_is_rejected_by_the_strategy(cpus, compression):
    with pytest.raises(ValueError, match="Received: .*Expected: "):
        MirroredStrategy(cpus[:2], compression=compression)
