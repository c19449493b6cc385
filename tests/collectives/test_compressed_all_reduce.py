"""The compressed reduction of one replica: policies, compression states, NaN and Inf, buckets and labels."""

import numpy as np
import numpy_references as references
import pytest
import tensorflow as tf
from compressed_replica import Replica
from replica_threads import on_replicas

from tfdist.collectives.compressed_all_reduce import method_label
from tfdist.compression import (
    Cast,
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    Policy,
    PowerSGD,
    Quantize,
    RandomK,
    Sign,
    TopK,
    WarmUp,
)

pytestmark = pytest.mark.usefixtures("cpus")
SHAPES = {"first/kernel": (40, 50), "first/bias": (50,), "second/kernel": (50, 64), "second/bias": (64,)}


def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def gradients_of(rank, step=0, dtype="float32"):
    return [normal(shape, 100 * step + 10 * rank + i).astype(dtype) for i, shape in enumerate(SHAPES.values())]


def total(size, position, step=0):
    return np.sum([gradients_of(rank, step)[position] for rank in range(size)], axis=0)


def test_each_variable_is_reduced_as_the_policy_says():
    policy = Policy({"first": TopK(0.1, 100), "second": Quantize(8)}, dense_below=60)

    def run(group, rank):
        replica = Replica(group, policy)
        return (
            [tensor.numpy() for tensor in replica.sums(gradients_of(rank), SHAPES)],
            replica.labels,
            set(replica.entries()),
        )

    results, _ = on_replicas(3, run)
    for kept, labels, entries in results:
        assert labels == ["Quantize(bits=8, block_size=256, stochastic=False)", "TopK(block_size=100, ratio=0.1)"]
        # The second bias has 64 values, and would not fill one block.
        assert entries == {"first/kernel:residual", "second/kernel:residual"}
        np.testing.assert_allclose(kept[1], total(3, 1), rtol=1e-6)
        np.testing.assert_allclose(kept[3], total(3, 3), rtol=1e-6)
        replicas = [[gradients_of(rank)[0]] for rank in range(3)]
        expected = references.OfBlocks(100, references.largest_values(10), False).exchange(replicas)[0][0]
        np.testing.assert_allclose(kept[0], expected, rtol=1e-6)
        assert 0 < np.abs(kept[2] - total(3, 2)).max() < 0.2


def test_buckets_are_sent_from_the_last_layer_whatever_their_method():
    policy = Policy({"second/kernel": Quantize(8), "first/kernel": Cast()}, dense_below=0)

    def run(group, rank):
        replica = Replica(group, policy, bucket_bytes=1)
        replica.sums(gradients_of(rank), SHAPES)
        return replica.labels

    (labels, _), _ = on_replicas(2, run)
    assert [label.partition("(")[0] for label in labels] == ["uncompressed", "Quantize", "uncompressed", "Cast"]


STATEFUL = {
    "feedback": Policy(TopK(0.05), dense_below=0),
    "low rank": Policy(PowerSGD(2), dense_below=0, dense_steps=1),
    "momentum": Policy(MomentumCorrection(TopK(0.05)), dense_below=0),
    "random": Policy(RandomK(0.1), dense_below=0),
    "stochastic": Policy(ErrorFeedback(Quantize(8, stochastic=True)), dense_below=0),
    "signs and sums": Policy({"first": Sign(32), "second/bias": None, ".*": Cast("float8")}, dense_below=0),
}


@pytest.mark.parametrize(("position", "bad"), [(0, np.nan), (1, -np.inf), (2, -np.inf), (3, np.nan)])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_bad_number_reaches_all_and_nothing_is_remembered(name, bad, position):
    """Wherever it stands: also in a gradient that is not compressed, and that travels by another method."""

    def run(group, rank):
        replica = Replica(group, STATEFUL[name], bucket_bytes=1000)
        for step in range(2):
            replica.sums(gradients_of(rank, step), SHAPES)
        before = replica.entries()
        gradients = gradients_of(rank, 2)
        if rank == 2:
            gradients[position].flat[-1] = bad
        sums = replica.sums(gradients, SHAPES)
        after = replica.entries()
        clean = replica.sums(gradients_of(rank, 3), SHAPES)
        return before, after, sums[position].numpy(), [tensor.numpy() for tensor in clean], replica.entries()

    results, _ = on_replicas(3, run)
    for before, after, bad_sum, clean, last in results:
        assert before, "there is a state"
        np.testing.assert_equal(after, before)
        assert not np.isfinite(bad_sum).all()
        assert all(np.isfinite(tensor).all() for tensor in clean)
        assert any(not np.array_equal(last[key], after[key]) for key in last), "the next step changes the state"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_are_compressed_and_come_back_as_such(dtype):
    def run(group, rank):
        replica = Replica(group, Policy(Quantize(8), dense_below=60))
        gradients = [tf.cast(gradient, dtype) for gradient in gradients_of(rank)]
        return replica.sums(gradients, SHAPES), replica.entries()

    results, _ = on_replicas(2, run)
    for sums, entries in results:
        for position, summed in enumerate(sums):
            assert summed.dtype == dtype
            # Two quantizations of values up to 4 by levels of 1/127, or the last place of bfloat16 for sums up to 8.
            assert np.abs(tf.cast(summed, tf.float32) - total(2, position)).max() < 2 * 4 / 127 + 2**-5
        assert {value.dtype for value in entries.values()} == {np.dtype("float32")}, "remainders keep their digits"


def test_other_dtypes_and_unknown_shapes_are_summed_exactly():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32), tf.TensorSpec([4000], tf.float64)])
    def step(unknown, double):
        class Twice:
            size, sends_short_sums_at_once = 2, False

            def sum(self, tensor):
                return tensor * 2

        replica = Replica(Twice(), Policy(Sign(32), dense_below=0))
        sums = replica.sums([unknown, double], ["unknown", "double"])
        assert not replica.entries()
        return sums

    unknown, double = step(tf.range(50.0), tf.range(4000, dtype=tf.float64) / 3)
    np.testing.assert_array_equal(unknown, 2 * np.arange(50.0))
    np.testing.assert_array_equal(double, 2 * (np.arange(4000) / 3))


def test_dense_steps_are_exact_and_then_compressed():
    def run(group, rank):
        replica = Replica(group, Policy(ErrorFeedback(Sign(32)), dense_steps=2, dense_below=0))
        return [replica.sums(gradients_of(rank, step), SHAPES)[2].numpy() for step in range(4)]

    results, groups = on_replicas(3, run)
    for sums in results:
        for step in range(2):
            np.testing.assert_allclose(sums[step], total(3, 2, step), rtol=1e-6, atol=1e-7)
        assert np.abs(sums[2] - total(3, 2, 2)).max() > 0.1
    sent = [array.nbytes for array in groups[0].sent]
    assert sent[0] == sent[1] == 4 * sum(np.prod(shape) for shape in SHAPES.values()) > 10 * sent[2]


def test_bytes_are_counted_beside_what_dense_would_have_sent():
    def run(group, rank):
        replica = Replica(group, Policy({"first": "int8", ".*": None}))
        replica.sums(gradients_of(rank), SHAPES)
        return replica.counters.by_label()

    (counts, *_), _ = on_replicas(4, run)
    of_layer = {name: 4 * sum(np.prod(s) for p, s in SHAPES.items() if p.startswith(name)) for name in ("first", "sec")}
    assert {label.partition("(")[0]: count.dense_bytes for label, count in counts.items()} == {
        "Quantize": 1.5 * of_layer["first"],
        "uncompressed": 1.5 * of_layer["sec"],
    }


def test_labels_are_names_without_what_wraps_them():
    wrapped = WarmUp(ErrorFeedback(TopK(0.1)), 3), MomentumCorrection(TopK(0.1))
    assert {method_label(compressor) for compressor in wrapped} == {repr(TopK(0.1))}
    assert method_label(ErrorFeedback(Dense())) == method_label(Dense()) == "uncompressed"
