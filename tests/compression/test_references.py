"""Each method's encoding against NumPy, and what is known of its error."""

import ml_dtypes
import numpy as np
import numpy_references as references
import pytest
import tensorflow as tf
from methods import METHODS, cases, low_rank

from tfdist.compression import Cast, PowerSGD, Quantize, RandomK, TopK
from tfdist.compression.powersgd import orthonormal

pytestmark = pytest.mark.usefixtures("cpus")
SHAPES = [(1,), (7,), (33, 65), (3, 3, 8, 16), (2000,)]


def values(shape, seed=0):
    """Of many magnitudes, so that a wrong scale or exponent shows."""
    random = np.random.default_rng(seed)
    return (random.normal(size=shape) * 10.0 ** random.uniform(-4, 2, size=shape)).astype("float32")


def decoded(compressor, gradient):
    payload, _ = compressor.encode(tf.constant(gradient), compressor.initial_state(gradient.shape))
    return compressor.decode(payload, gradient.shape).numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", cases())
def test_encoding_equals_numpy(name, shape):
    case = cases()[name]
    gradient = values(shape)
    expected = case.reference.approximate(gradient)
    # A scale may be off by a unit in the last place of float32.
    np.testing.assert_allclose(decoded(case.compressor, gradient), expected, rtol=1e-6, atol=0)


def test_bfloat16_is_that_of_ml_dtypes():
    gradient = values((5000,))
    np.testing.assert_array_equal(decoded(Cast("bfloat16"), gradient), gradient.astype(ml_dtypes.bfloat16))


def test_float16_saturates_and_float8_lies_between_its_neighbours():
    np.testing.assert_array_equal(decoded(Cast("float16"), np.float32([1e6, -7e4, 65519])), [65504, -65504, 65504])
    gradient = values((128 * 40,))
    blocks = gradient.reshape(-1, 128)
    # Near the middle of two values of float8, the rounding to float16 before may decide to which of them it goes.
    least, most = (references.float8(blocks, moved) for moved in (-1, 1))
    ours = decoded(Cast("float8"), gradient).reshape(-1, 128)
    rounding = 1e-6 * np.abs(ours)
    assert ((least - rounding <= ours) & (ours <= most + rounding)).all()
    assert np.isclose(ours, references.float8(blocks), rtol=1e-6, atol=0).mean() > 0.98


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_are_off_by_half_a_level_and_extremes_are_exact(bits):
    blocks = values((20, 256))
    errors = np.abs(decoded(Quantize(bits), blocks) - blocks)
    levels = 127 if bits == 8 else 7
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    assert (errors <= 0.5 * largest / levels * (1 + 1e-5)).all()
    assert (errors[np.abs(blocks) == largest.repeat(256, axis=1)] <= 1e-6 * largest.ravel()).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_has_no_bias_and_goes_to_a_neighbour(bits):
    gradient = tf.constant(values((512,)))
    compressor = Quantize(bits, stochastic=True)
    levels = np.abs(gradient.numpy().reshape(2, 256)).max(axis=1).repeat(256) / (127 if bits == 8 else 7)
    state, results = compressor.initial_state((512,)), []
    for _ in range(400):
        payload, state = compressor.encode(gradient, state)
        results.append(compressor.decode(payload, (512,)).numpy())
    errors = (np.stack(results) - gradient.numpy()) / levels
    assert np.abs(errors).max() < 1 + 1e-4
    # The variance of a rounding is at most 1/4: the mean of 400 has a deviation of 1/40, of 512 such that of 1/900.
    assert np.abs(errors.mean(axis=0)).max() < 5 / 40
    assert abs(errors.mean()) < 5 / 900
    assert len({result.tobytes() for result in results}) == 400, "each step draws new numbers"


def test_replicas_with_other_values_draw_other_numbers():
    gradient = np.random.default_rng(0).uniform(size=(1024,)).astype("float32")
    ups = [decoded(Quantize(8, stochastic=True), g) > g for g in (gradient, gradient + np.float32(1e-6))]
    # Two independent draws for a uniform remainder agree in 2 of 3 values; a deviation is 0.015. Equal ones do in all.
    assert abs((ups[0] == ups[1]).mean() - 2 / 3) < 5 * 0.015


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5])
def test_random_values_are_one_of_each_block_and_all_in_turn(ratio):
    compressor, size = RandomK(ratio), round(1 / ratio)
    gradient = np.arange(1, 20 * size + 1, dtype="float32")
    state, chosen = compressor.initial_state(gradient.shape), []
    for _ in range(150):
        payload, state = compressor.encode(tf.constant(gradient), state)
        result = compressor.decode(payload, gradient.shape).numpy()
        assert ((result == 0) | (result == gradient)).all()
        assert ((result != 0).reshape(20, size).sum(axis=1) == 1).all()
        chosen.append(np.flatnonzero(result) % size)
    counts = np.bincount(np.concatenate(chosen), minlength=size)
    mean = 150 * 20 / size
    assert (np.abs(counts - mean) < 5 * mean**0.5).all(), "uniform: within five deviations of a Poisson number"


def test_random_positions_come_from_the_seed_alone():
    kept = [
        np.flatnonzero(decoded(RandomK(0.1, seed), values((1000,), data))) for seed, data in [(0, 0), (0, 1), (1, 1)]
    ]
    np.testing.assert_array_equal(kept[0], kept[1])
    assert not np.array_equal(kept[1], kept[2])


@pytest.mark.parametrize("shape", [(33, 65), (65, 33), (3, 3, 8, 16)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_is_the_projection_on_what_the_factor_spans(rank, shape):
    case = low_rank(rank, [shape])
    gradient = np.random.default_rng(0).normal(size=shape).astype("float32")
    expected = case.reference.approximate(gradient)
    np.testing.assert_allclose(decoded(case.compressor, gradient), expected, atol=case.tolerance)


def test_low_rank_converges_to_the_best_approximation():
    """Power iteration: with its warm start the factor turns to the largest singular vectors."""
    random = np.random.default_rng(0)
    matrix = (random.normal(size=(40, 2)) @ random.normal(size=(2, 30)) * 5 + random.normal(size=(40, 30))).astype("f")
    left, singular, right = np.linalg.svd(matrix)
    best = (left[:, :2] * singular[:2]) @ right[:2]
    compressor = PowerSGD(2)
    state = compressor.initial_state(matrix.shape)
    for _ in range(12):  # (sigma_3 / sigma_2) ** 24 is below 1e-12 here
        payload, state = compressor.encode(tf.constant(matrix), state)
    np.testing.assert_allclose(compressor.decode(payload, matrix.shape), best, atol=1e-3)


@pytest.mark.parametrize("case", ["a rank below", "zeros", "a column twice", "a column of zeros"])
def test_low_rank_survives_dependent_columns(case):
    random = np.random.default_rng(0)
    thin = {"a rank below": random.normal(size=(40, 1)) @ random.normal(size=(1, 30)), "zeros": np.zeros((40, 30))}
    if case in thin:
        matrix = tf.constant(thin[case], tf.float32)
        compressor = PowerSGD(4)
        state = compressor.initial_state((40, 30))
        for _ in range(3):
            payload, state = compressor.encode(matrix, state)
            np.testing.assert_allclose(compressor.decode(payload, (40, 30)), matrix, atol=1e-4)
            assert np.linalg.matrix_rank(state["factor"]) == 4, "random columns replace columns of zeros"
        return
    columns = random.normal(size=(40, 3)).astype("float32")
    columns[:, 2] = columns[:, 1] if case == "a column twice" else 0
    (basis,) = orthonormal([tf.constant(columns)])
    expected, _ = np.linalg.qr(columns[:, :2])
    np.testing.assert_allclose(basis @ tf.transpose(basis), expected @ expected.T, atol=1e-5)


def test_orthonormal_bases_do_not_mix_matrices_nor_scales():
    random = np.random.default_rng(1)
    matrices = [random.normal(size=(rows, 3)) * 10.0 ** np.array([-6, 0, 6]) for rows in (5, 50)]
    for matrix, basis in zip(matrices, orthonormal([tf.constant(m, tf.float32) for m in matrices]), strict=True):
        expected, _ = np.linalg.qr(matrix)
        np.testing.assert_allclose(basis @ tf.transpose(basis), expected @ expected.T, atol=2e-4)


def test_top_k_sends_what_its_ratio_says():
    for ratio, block, count in ((0.01, None, 1), (0.1, 64, 6), (0.02, 1000, 20), (0.5, 2, 1)):
        size = block or round(1 / ratio)
        gradient = np.random.default_rng(0).normal(size=(12 * size,)).astype("float32")
        assert np.count_nonzero(decoded(TopK(ratio, block), gradient)) == 12 * count


def test_payloads_are_as_small_as_the_docstrings_say():
    thousand = (1000, 1000)
    bytes_of = {name: METHODS[name].payload_bytes(thousand) / 10**6 for name in METHODS}
    expected = {"dense": 4, "bf16": 2, "fp16": 2, "fp8": 1.03, "int8": 1.016, "int4": 0.516, "sign": 0.141}
    expected |= {"topk 0.01": 0.05, "randomk 0.01": 0.04, "powersgd 2": 4 * 2 * 2000 / 10**6}
    for name, size in expected.items():
        assert abs(bytes_of[name] - size) <= 0.005 * size, name
