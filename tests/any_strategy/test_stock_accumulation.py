"""GradientAccumulation under TensorFlow's own strategies equals one process on the concatenated batches."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from stock_strategy import FakeTPUStrategy, stock_mirrored
from testing.pairs import case_name, pairwise

from tfdist.callbacks import GradientAccumulation

pytestmark = pytest.mark.usefixtures("cpus")

STRATEGIES = {
    "none": tf.distribute.get_strategy,
    "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "mirrored": lambda: stock_mirrored(["CPU:0", "CPU:1"]),
    "mirrored, one device": lambda: stock_mirrored(["CPU:0"]),
    "one worker": tf.distribute.MultiWorkerMirroredStrategy,
    "TPU, faked": FakeTPUStrategy,
}
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(48, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)
TARGETS[21] = 1e6  # with a large loss scale the second batch of 16 overflows, on one replica
IDS = RANDOM.integers(0, 6, size=(48, 3)).astype("int32")


def everything(accumulated=None, **arguments):
    """Everything that counts updates or uses the reduced gradients: scale, schedule, clipping, decay, averages."""
    keras.utils.set_random_seed(0)
    constraint = keras.constraints.MaxNorm(1.0)
    hidden = keras.layers.Dense(8, "tanh", kernel_constraint=constraint)
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.05, 6),
        global_clipnorm=0.5,
        weight_decay=0.01,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=2,
        gradient_accumulation_steps=accumulated,
    )
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**118, dynamic_growth_steps=2)
    model.compile(scaled, loss="mse", **arguments)
    return model, INPUTS


def embedding(**arguments):
    """Sparse gradients, with repeated rows."""
    keras.utils.set_random_seed(0)
    table = keras.layers.Embedding(6, 4)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mae", **arguments)
    return model, IDS


def made(strategy, program=everything, **arguments):
    with STRATEGIES[strategy]().scope():
        return program(**arguments)


def fit(model, inputs, *callbacks, rows=slice(None), batch_size=4, epochs=1):
    data = tf.data.Dataset.from_tensor_slices((inputs[rows], TARGETS[rows])).batch(batch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Training ended after")
        history = model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return history.history


def state(model):
    """Weights, number of updates, and loss scale, by name."""
    found = {f"weight {index}": weight for index, weight in enumerate(model.get_weights())}
    found["updates"] = int(model.optimizer.iterations)
    if hasattr(model.optimizer, "dynamic_scale"):
        found["scale"] = float(model.optimizer.dynamic_scale.numpy())
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Weights are at most 1. A mean of 16 samples is a mean of four means, and Adam may divide by small numbers.
        np.testing.assert_allclose(found[name], value, rtol=0, atol=3e-6, err_msg=name)


@pytest.fixture(scope="module")
def one_process():
    """`one_process(program)`: two epochs with batches of 16, without a strategy or a callback."""
    results = {}

    def result(program):
        if program not in results:
            model, inputs = program()
            history = fit(model, inputs, batch_size=16, epochs=2)
            results[program] = state(model), history["loss"]
        return results[program]

    return result


def test_large_batch_overflows_once_per_epoch(one_process):
    expected, _ = one_process(everything)
    assert expected["updates"] == 4 and expected["scale"] == 2.0**117


FACTORS = {
    "program": [everything, embedding],
    "strategy": list(STRATEGIES),
    "jit_compile": [False, True, "auto"],
    "steps_per_execution": [1, 4],
}


def is_allowed(case):
    """XLA cannot compile the collectives of TensorFlow's replicas."""
    return case["strategy"] != "mirrored" or case["jit_compile"] is not True


DEFAULTS = {"strategy": ["mirrored", "one device", "one worker", "TPU, faked"], "jit_compile": [False, True]}
BY_DEFAULT = pairwise({**FACTORS, **DEFAULTS}, is_allowed)
MORE = [case for case in pairwise(FACTORS, is_allowed) if case not in BY_DEFAULT]


@pytest.mark.parametrize(
    "case", [*BY_DEFAULT, *(pytest.param(case, marks=pytest.mark.long) for case in MORE)], ids=case_name
)
def test_equals_one_process(one_process, case):
    program, strategy, *_ = case.values()
    arguments = {name: case[name] for name in ("jit_compile", "steps_per_execution")}
    model, inputs = made(strategy, program, **arguments)
    history = fit(model, inputs, GradientAccumulation(4), epochs=2)
    expected, loss = one_process(program)
    assert_equal(state(model), expected)
    np.testing.assert_allclose(history["loss"], loss, rtol=1e-6)


@pytest.mark.long
def test_replicas_run_eagerly(one_process):
    model, inputs = made("mirrored", run_eagerly=True)
    fit(model, inputs, GradientAccumulation(4), epochs=2)
    assert_equal(state(model), one_process(everything)[0])


def test_flush_applies_the_mean_over_the_remainder():
    reference, inputs = made("none")
    fit(reference, inputs, rows=slice(24, 40), batch_size=16)
    fit(reference, inputs, rows=slice(40, 48), batch_size=8)
    model, inputs = made("mirrored")
    fit(model, inputs, GradientAccumulation(4, flush_at_end=True), rows=slice(24, 48))
    assert_equal(state(model), state(reference))


def test_number_may_change_between_epochs():
    reference, inputs = made("none", embedding)
    fit(reference, inputs)
    fit(reference, inputs, batch_size=16)
    model, inputs = made("mirrored", embedding)
    fit(model, inputs, GradientAccumulation({0: 1, 1: 4}), epochs=2)
    assert_equal(state(model), state(reference))


def test_what_keras_has_accumulated_counts(one_process):
    """Two micro-steps by Keras, the rest by tfdist, in a step that was traced before.

    Keras raises the loss scale after micro-steps, tfdist after updates.
    """
    model, inputs = made("one device", accumulated=4)
    fit(model, inputs, rows=slice(0, 8))
    fit(model, inputs, GradientAccumulation(4), rows=slice(8, 48))
    fit(model, inputs, GradientAccumulation(4))
    expected = one_process(everything)[0]
    assert_equal({**state(model), "scale": expected["scale"]}, expected)


def test_models_without_the_callback_are_not_changed():
    """Keras cannot accumulate under a strategy."""
    model, inputs = made("mirrored, one device", accumulated=4)
    with pytest.raises(RuntimeError, match="merge_call"):
        fit(model, inputs)
