"""Every method on 2, 3 and 4 replicas, several steps with error feedback: equal to the exchange in NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from methods import KINDS, METHODS, Case, cases, low_rank, of_blocks
from numpy_references import AtPositions, integers
from replica_threads import on_replicas

from tfdist.compression import ErrorFeedback, MomentumCorrection, Quantize, RandomK, TopK

pytestmark = pytest.mark.usefixtures("cpus")
SHAPES = [(33, 65), (7, 300), (40, 40)]
# Two replicas exchange in one phase, three in two phases with uneven slices; four do nothing else.
SIZES = [2, 3, pytest.param(4, marks=pytest.mark.long)]
STEPS = 4


def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def gradients_of(size, step, shapes=SHAPES):
    """Of unequal magnitudes, so that a replica that is left out or counted twice shows."""
    return [[normal(shape, 100 * step + 10 * r + i) * (r + 1) for i, shape in enumerate(shapes)] for r in range(size)]


def steps_on_replicas(compressor, size, steps=STEPS, shapes=SHAPES, gradients=gradients_of):
    """What each step has given each replica: `[step][replica]`, sums and states as arrays; and the groups."""

    def run(group, rank):
        states = [compressor.initial_state(shape) for shape in shapes]
        seen = []
        for step in range(steps):
            own = [tf.constant(gradient) for gradient in gradients(size, step, shapes)[rank]]
            reduced = compressor.reduce(own, group, states)
            states = reduced.states
            seen.append(tf.nest.map_structure(lambda tensor: tensor.numpy(), (reduced.sums, states, reduced.finite)))
        return seen

    results, groups = on_replicas(size, run)
    return list(zip(*results, strict=True)), groups


def assert_equal_but_ties(ours, expected, tolerance):
    """Equal up to the rounding of float32 in sums of a few terms, but for two values that stood on a tie."""
    scale = np.abs(expected).max()
    differing = ~np.isclose(ours, expected, rtol=10 * tolerance, atol=10 * tolerance * scale)
    assert np.count_nonzero(differing) <= 2, f"{np.count_nonzero(differing)} of {differing.size} values differ"


def case_of(name):
    if name.startswith("powersgd"):
        return low_rank(int(name.split()[1]), SHAPES)
    if name == "qsgd":
        return Case(
            Quantize(8, stochastic=True), of_blocks(256, integers(127, lambda x: np.floor(x + np.float32(0.25))))
        )
    if name == "randomk":
        return Case(RandomK(0.05, seed=2), AtPositions(20))
    return cases()[name]


def _is_long(name, size):
    """By default three replicas exchange by all methods, two by one of each class."""
    return size == 4 or (size == 2 and name not in [*KINDS, "randomk"])


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.long] * _is_long(name, size))
        for name in [*cases(), "qsgd", "randomk", "powersgd 1", "powersgd 2", "powersgd 4"]
        for size in (2, 3, 4)
    ],
)
def test_several_steps_equal_numpy(name, size, monkeypatch):
    case = case_of(name)
    if name == "qsgd":  # with known random numbers
        monkeypatch.setattr(tf.random, "stateless_uniform", lambda shape, seed: tf.fill(shape, 0.25))
    seen, _ = steps_on_replicas(ErrorFeedback(case.compressor), size)
    residuals = [[np.zeros(shape, "float32") for shape in SHAPES] for _ in range(size)]
    for step, replicas in enumerate(seen):
        corrected = [
            [gradient + residual for gradient, residual in zip(*pair, strict=True)]
            for pair in zip(gradients_of(size, step), residuals, strict=True)
        ]
        ours, states, _ = replicas[0]
        hints = {"delivered": ours} if name == "randomk" else {}
        sums, residuals = case.reference.exchange(corrected, **hints)
        for replica, (replica_sums, states, finite) in enumerate(replicas):
            assert finite
            for position, expected in enumerate(sums):
                np.testing.assert_array_equal(replica_sums[position], ours[position], "replicas differ")
                assert_equal_but_ties(replica_sums[position], expected, case.tolerance)
                remainder = states[position]["residual"]
                # Dense leaves nothing, low rank and casts a difference of numbers as large as the gradient.
                largest = np.abs(corrected[replica][position]).max()
                assert_equal_but_ties(remainder + largest, residuals[replica][position] + largest, case.tolerance)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", METHODS)
def test_nothing_of_a_gradient_is_lost(name, size):
    seen, _ = steps_on_replicas(ErrorFeedback(METHODS[name]), size, steps=3)
    for position, shape in enumerate(SHAPES):
        given = sum(replica[position].astype("float64") for step in range(3) for replica in gradients_of(size, step))
        delivered = sum(step[0][0][position].astype("float64") for step in seen)
        kept = sum(states[position]["residual"].astype("float64") for _, states, _ in seen[-1])
        # A dozen float32 additions of numbers up to the largest corrected gradient, each off by 6e-8 of it; PowerSGD
        # delivers a product over `rank` terms, its sum and its remainder from one and the same.
        largest = max(np.abs(step[0][0][position]).max() for step in seen) + np.abs(given).max()
        assert np.abs(given - delivered - kept).max() <= 12 * size * 6e-8 * largest, shape


@pytest.mark.parametrize(("size", "bad"), [(2, np.nan), (3, -np.inf), pytest.param(4, np.inf, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", METHODS)
def test_a_bad_number_of_one_replica_is_seen_by_all(name, bad, size):
    def gradients(size, step, shapes):
        values = gradients_of(size, step, shapes)
        values[size - 1][1][5, 17] = bad
        return values

    (replicas,), _ = steps_on_replicas(ErrorFeedback(METHODS[name]), size, steps=1, gradients=gradients)
    for sums, _, finite in replicas:
        assert not finite
        assert not np.isfinite(sums[1]).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["dense", "topk 0.01", *KINDS])
def test_bytes_on_the_wire(name, size):
    shapes = [(600, 500), (500, 400)]
    compressor = METHODS[name]
    _, groups = steps_on_replicas(ErrorFeedback(compressor), size, steps=1, shapes=shapes)
    payload = sum(compressor.payload_bytes(shape) for shape in shapes)
    copies = size - 1 if isinstance(compressor, TopK) else 2 * (size - 1) / size
    for group in groups:
        assert 0.98 * copies * payload <= group.wire_bytes <= 1.02 * copies * payload


@pytest.mark.parametrize("name", ["bf16", "int8", "topk 0.01", "randomk 0.3", "powersgd 2"])
@pytest.mark.parametrize("size", SIZES)
def test_uncompressed_tensors_travel_in_the_same_collectives_and_exactly(name, size):
    compressor, shapes = ErrorFeedback(METHODS[name]), [(33, 65), (65,), (3,), (40, 40)]
    values = gradients_of(size, 0, shapes)

    def run(group, rank):
        states = [compressor.initial_state(shape) if len(shape) == 2 else None for shape in shapes]
        return compressor.reduce([tf.constant(value) for value in values[rank]], group, states)

    results, groups = on_replicas(size, run)
    for reduced in results:
        for position in (1, 2):
            expected = np.sum([replica[position] for replica in values], axis=0)
            np.testing.assert_allclose(reduced.sums[position], expected, rtol=1e-6)
            assert not reduced.states[position]
    alone = on_replicas(
        size,
        lambda group, rank: compressor.reduce(
            [tf.constant(values[rank][0])], group, [compressor.initial_state((33, 65))]
        ),
    )[1]
    assert len(groups[0].sent) == len(alone[0].sent), "small tensors share a collective"
    for reduced in (results[0], results[-1]):
        assert not np.isnan(reduced.sums[0]).any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("clipnorm", [None, 15.0])
@pytest.mark.parametrize("name", ["topk 0.1 of 64", "randomk 0.3"])
def test_momentum_correction_equals_deep_gradient_compression(name, clipnorm, size):
    """Lin et al. 2018, algorithm 1 of the appendix, but for what is sent: see the reference of the method."""
    compressor = MomentumCorrection(METHODS[name], 0.8, clipnorm)
    reference = cases()[name].reference if name in cases() else AtPositions(3)
    seen, _ = steps_on_replicas(compressor, size)
    velocities, totals = ([[np.zeros(shape, "float32") for shape in SHAPES] for _ in range(size)] for _ in range(2))
    for step, replicas in enumerate(seen):
        for replica, gradients in enumerate(gradients_of(size, step)):
            for position, gradient in enumerate(gradients):
                norm = np.sqrt(np.sum(gradient.astype("float64") ** 2))
                if clipnorm is not None and norm > clipnorm:
                    gradient = (gradient * (clipnorm / norm)).astype("float32")
                velocities[replica][position] = np.float32(0.8) * velocities[replica][position] + gradient
                totals[replica][position] = totals[replica][position] + velocities[replica][position]
        hints = {"delivered": replicas[0][0]} if name.startswith("randomk") else {}
        sums, remainders = reference.exchange(totals, **hints)
        for replica, (replica_sums, states, _) in enumerate(replicas):
            for position, expected in enumerate(sums):
                assert_equal_but_ties(replica_sums[position], expected, 1e-6)
                sent = remainders[replica][position] != totals[replica][position]
                velocities[replica][position] = velocities[replica][position] * ~sent
                assert_equal_but_ties(states[position]["residual"], remainders[replica][position], 1e-6)
                assert_equal_but_ties(states[position]["velocity"], velocities[replica][position], 1e-6)
        totals = remainders
