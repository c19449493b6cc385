"""Sums of encoded rows: replicas with other rows, or none, and what waits until a row is touched again."""

import numpy as np
import numpy_references as references
import pytest
import tensorflow as tf
from compressed_replica import Replica
from replica_threads import on_replicas

from tfdist.compression import MomentumCorrection, Policy, PowerSGD, TopK

pytestmark = pytest.mark.usefixtures("cpus")
TABLE = (200, 16)
ROWS = {0: [3, 150, 3, 77, 9], 1: [9, 150], 2: [], 3: [199, 0, 9]}  # one twice, one replica without any
METHODS = {
    "int8": (Policy("int8"), references.OfBlocks(256, references.integers(127))),
    "bf16": (Policy("bf16"), references.OfBlocks(2, references.bfloat16)),
    "sign": (Policy("sign"), references.OfBlocks(256, references.signs)),
    "topk": (Policy(TopK(0.1, 64)), references.OfBlocks(64, references.largest_values(6))),
    "dense": (Policy({"other": "int8"}), references.Exactly()),
    "powersgd": (Policy("powersgd:2"), references.Exactly()),
    "warm-up": (Policy("int8", dense_steps=9), references.Exactly()),
}


def slices_of(rank, step):
    indices = ROWS[(rank + step) % 4]
    values = np.random.default_rng(10 * step + rank).normal(size=(len(indices), TABLE[1])).astype("float32")
    return values, np.array(indices, "int64")


def as_slices(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant(TABLE, tf.int64))


def reduce_steps(size, policy, steps, slices=slices_of):
    def run(group, rank):
        replica, seen = Replica(group, policy), []
        for step in range(steps):
            summed = replica.sums([as_slices(*slices(rank, step))], ["table"])[0]
            assert len(set(summed.indices.numpy().tolist())) == len(summed.indices), "an index stands twice"
            dense = np.zeros(TABLE, "float32")
            dense[summed.indices.numpy()] = summed.values.numpy()
            seen.append((dense, replica.entries()))
        return seen

    results, groups = on_replicas(size, run)
    return list(zip(*results, strict=True)), groups


def without_duplicates(values, indices):
    unique = list(dict.fromkeys(indices.tolist()))
    summed = np.zeros((len(unique), TABLE[1]), "float32")
    np.add.at(summed, [unique.index(index) for index in indices], values)
    return summed, unique


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", METHODS)
def test_rows_equal_numpy(name, size):
    policy, reference = METHODS[name]
    seen, _ = reduce_steps(size, policy, steps=4)
    residuals = np.zeros((size, *TABLE), "float32")
    feedback = name in ("int8", "sign", "topk")
    for step, replicas in enumerate(seen):
        expected = np.zeros(TABLE, "float32")
        owned = [without_duplicates(*slices_of(rank, step)) for rank in range(size)]
        longest = max(len(rows) for _, rows in owned)
        for rank, (values, rows) in enumerate(owned):
            # All replicas send as many rows; those that have fewer add zeros.
            corrected = np.zeros((longest, TABLE[1]), "float32")
            corrected[: len(rows)] = values + residuals[rank][rows]
            decoded = reference.approximate(corrected)[: len(rows)]
            expected[rows] += decoded
            if feedback:
                residuals[rank][rows] = corrected[: len(rows)] - decoded
        for rank, (dense, entries) in enumerate(replicas):
            np.testing.assert_array_equal(dense, replicas[0][0], "replicas differ")
            np.testing.assert_allclose(dense, expected, rtol=1e-5, atol=1e-6)
            if feedback:
                np.testing.assert_allclose(entries["table:residual"], residuals[rank], atol=1e-6)
    untouched = sorted(set(range(TABLE[0])) - {index for rows in ROWS.values() for index in rows})
    assert not residuals[:, untouched].any()


@pytest.mark.parametrize("method", ["int8", "qsgd", MomentumCorrection(TopK(0.1, 64))], ids=str)
def test_a_bad_row_reaches_all_and_nothing_is_remembered(method):
    def slices(rank, step):
        values, indices = slices_of(rank, step)
        if step == 1 and rank == 1:  # This replica has no rows at one end; another one has.
            values = values.copy()
        if step == 1 and len(values) and rank == 0:
            values[0, 3] = np.nan
        return values, indices

    seen, _ = reduce_steps(3, Policy(method), steps=3, slices=slices)
    changed = False
    for rank in range(3):
        (_, before), (bad, after), (clean, last) = (step[rank] for step in seen)
        assert before
        np.testing.assert_equal(after, before)
        assert not np.isfinite(bad).all()
        assert np.isfinite(clean).all()
        changed = changed or any(not np.array_equal(last[key], after[key]) for key in last)
    assert changed, "the next step changes the state, except on a replica without rows"


def test_no_rows_anywhere_are_no_rows():
    nothing = (np.zeros((0, TABLE[1]), "float32"), np.zeros([0], "int64"))
    seen, _ = reduce_steps(3, Policy("int8"), steps=2, slices=lambda rank, step: nothing)
    assert not seen[-1][0][0].any()


def test_encoded_rows_are_smaller_than_they_were():
    def slices(rank, step):
        indices = np.arange(100) + 50 * rank
        return np.ones((100, TABLE[1]), "float32"), indices

    nbytes = {}
    for name in ("int8", "dense"):
        _, groups = reduce_steps(2, METHODS[name][0], steps=1, slices=slices)
        nbytes[name] = sum(array.nbytes for array in groups[0].sent)
    # The number of rows, 8 bytes an index, and the values: at one byte, with a scale of 4 for 256, or at four.
    assert nbytes["int8"] == 4 + 100 * 8 + -(-1600 // 256) * 260
    assert nbytes["dense"] == 4 + 100 * 8 + 1600 * 4


def test_rows_under_low_rank_are_exact_and_keep_no_state():
    seen, _ = reduce_steps(2, Policy(PowerSGD(2), dense_below=0), steps=2)
    assert seen[-1][0][1] == {}


def test_momentum_correction_clips_rows():
    policy = Policy(MomentumCorrection(TopK(0.5, 2), 0.9, clipnorm=1.0), dense_below=0)
    values, indices = np.full((1, TABLE[1]), 10, "float32"), np.array([5], "int64")
    seen, _ = reduce_steps(4, policy, steps=1, slices=lambda rank, step: (values, indices))
    # Half of the values are sent, and the rest is kept.
    (sums, entries) = seen[0][0]
    given = sums[5] / 4 + entries["table:residual"][5]
    np.testing.assert_allclose(np.linalg.norm(given), 1.0, rtol=1e-5)
