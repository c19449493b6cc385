"""What every compressor promises, whatever it wraps: shapes, bytes, purity, zeros, and bad numbers that are seen."""

import numpy as np
import pytest
import tensorflow as tf
from methods import KINDS, SHAPES, WRAPPED
from replica_threads import EqualReplicas

from tfdist.compression import ErrorFeedback, MomentumCorrection, TopK

pytestmark = pytest.mark.usefixtures("cpus")


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def decoded(compressor, gradient):
    payload, _ = compressor.encode(tf.constant(gradient), compressor.initial_state(gradient.shape))
    return compressor.decode(payload, gradient.shape).numpy()


def arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestEncoding:
    def test_payload_is_as_long_as_promised_and_decoded_to_the_gradient_s_shape(self, name, shape):
        compressor = WRAPPED[name]
        payload, _ = compressor.encode(tf.constant(normal(shape)), compressor.initial_state(shape))
        assert sum(tensor.numpy().nbytes for tensor in payload.values()) == compressor.payload_bytes(shape)
        result = compressor.decode(payload, shape)
        assert (result.shape, result.dtype) == (shape, tf.float32)
        assert np.isfinite(result.numpy()).all()

    def test_same_input_and_state_make_the_same_output(self, name, shape):
        compressor = WRAPPED[name]
        state = compressor.initial_state(shape)
        before = arrays(state)
        first, first_state = compressor.encode(tf.constant(normal(shape)), state)
        second, second_state = compressor.encode(tf.constant(normal(shape)), state)
        np.testing.assert_equal(arrays(first), arrays(second))
        np.testing.assert_equal(arrays(first_state), arrays(second_state))
        np.testing.assert_equal(arrays(state), before)

    def test_state_keeps_its_structure(self, name, shape):
        compressor = WRAPPED[name]
        state = compressor.initial_state(shape)
        expected = {entry: (value.shape, value.dtype) for entry, value in state.items()}
        for step in range(2):
            _, state = compressor.encode(tf.constant(normal(shape, step)), state)
            assert {entry: (value.shape, value.dtype) for entry, value in state.items()} == expected

    def test_zeros_stay_zeros(self, name, shape):
        compressor = WRAPPED[name]
        state = compressor.initial_state(shape)
        for _ in range(2):  # the second time with what the first has left
            payload, state = compressor.encode(tf.zeros(shape), state)
            np.testing.assert_array_equal(compressor.decode(payload, shape), np.zeros(shape))


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, pytest.param(-np.inf, marks=pytest.mark.long)])
def test_bad_numbers_anywhere_come_out_as_bad_numbers(name, bad):
    for shape, positions in (((), [0]), ((7,), [0, 6]), ((33, 65), [0, 1200, 33 * 65 - 1])):
        for position in positions:
            gradient = normal(shape)
            gradient.flat[position] = bad
            assert not np.isfinite(decoded(WRAPPED[name], gradient)).all(), (shape, position)


@pytest.mark.parametrize("name", [name for name in WRAPPED if name.startswith(("feedback", "momentum"))])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_change_no_state(name, bad):
    compressor = WRAPPED[name]
    _, state = compressor.encode(tf.constant(normal((33, 65))), compressor.initial_state((33, 65)))
    gradient = normal((33, 65), 1)
    gradient[20, 7] = bad
    _, after = compressor.encode(tf.constant(gradient), state)
    assert set(after) == set(state)
    for entry in state:
        np.testing.assert_array_equal(after[entry], state[entry])


@pytest.mark.parametrize("name", KINDS)
def test_a_traced_function_computes_the_same(name):
    compressor, shape = WRAPPED[f"feedback {name}"], (33, 65)
    gradient, state = tf.constant(normal(shape)), compressor.initial_state(shape)

    @tf.function
    def traced(gradient, state):
        payload, state = compressor.encode(gradient, state)
        result = compressor.decode(payload, shape)
        # Of static shapes, as XLA and checkpoints need them.
        assert all(tensor.shape.is_fully_defined() for tensor in tf.nest.flatten([payload, result, state]))
        return payload, result, state

    payload, result, new_state = traced(gradient, state)
    expected, expected_state = compressor.encode(gradient, state)
    for ours, eager in ((payload, expected), (new_state, expected_state)):
        assert set(ours) == set(eager)
        for entry in ours:
            np.testing.assert_allclose(ours[entry], eager[entry], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result, decoded(compressor, gradient.numpy()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_reduction_is_compiled_by_xla(name):
    compressor, shape, size = WRAPPED[f"feedback {name}"], (33, 65), 3

    def step(gradient, state):
        reduced = compressor.reduce([gradient], EqualReplicas(size), [state])
        return reduced.sums[0], reduced.states[0]["residual"], reduced.finite

    gradient, state = tf.constant(normal(shape)), compressor.initial_state(shape)
    *compiled, finite = tf.function(step, jit_compile=True)(gradient, state)
    *eager, _ = step(gradient, state)
    assert bool(finite)
    if name == "qsgd":  # its seeds come from a sum over values, in which XLA rounds otherwise: two errors of a level
        own = slice(0, 3 * 256)  # the first of three replicas has the sum of these blocks
        level = np.abs(gradient).max() / 127
        assert np.abs(np.ravel(compiled[0]) - size * np.ravel(gradient))[own].max() <= 2 * size * level
        return
    for ours, expected in zip(compiled, eager, strict=True):
        # XLA fuses a product and a sum to one rounding, so that a few values on a tie are rounded the other way.
        assert np.isclose(ours, expected, rtol=1e-4, atol=1e-4).mean() > 0.995


# Norms square values, and the squares overflow, too.
WITHOUT_NORMS = [name for name, c in WRAPPED.items() if "powersgd" not in name and not getattr(c, "clipnorm", None)]


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_finite_gradients_whose_sum_overflows_are_finite(name):
    compressor, gradient = WRAPPED[name], np.full([2048], 2e36, "float32")
    assert 2e36 * 2048 > np.finfo("float32").max
    state = compressor.initial_state(gradient.shape)
    payload, state_after = compressor.encode(tf.constant(gradient), state)
    assert np.isfinite(compressor.decode(payload, gradient.shape).numpy()).all()
    assert all(np.isfinite(value).all() for value in arrays(state_after).values())
    reduced = compressor.reduce([tf.constant(gradient)], EqualReplicas(2), [state])
    assert reduced.finite.numpy()
    assert np.isfinite(reduced.sums[0].numpy()).all()


@pytest.mark.parametrize("compressor", [ErrorFeedback(TopK(0.1)), MomentumCorrection(TopK(0.1))], ids=repr)
def test_a_gradient_whose_sum_overflows_is_sent_or_kept(compressor):
    gradient = np.full(2048, 3e38, "float32")
    payload, state = compressor.encode(tf.constant(gradient), compressor.initial_state(gradient.shape))
    sent = compressor.decode(payload, gradient.shape).numpy()
    assert 0 < np.count_nonzero(sent) < len(gradient)
    np.testing.assert_array_equal(sent + state["residual"].numpy(), gradient)
