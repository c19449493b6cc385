"""CollectiveGroup: results and counts."""

import numpy as np
import pytest
import tensorflow as tf
from replica_threads import ThreadGroup, ThreadLauncher, on_replicas, thread_groups

from tfdist.collectives.byte_counters import ByteCounters
from tfdist.collectives.collective_group import CollectiveGroup

pytestmark = pytest.mark.usefixtures("cpus")
LABEL = "int8"


def on_collective_groups(size, function):
    """Runs `function(group, rank)` with collective groups over threads; also what each has counted and sent."""
    traffics = [ByteCounters("CPU:0") for _ in range(size)]

    def run(group, rank):
        return function(CollectiveGroup(ThreadLauncher(group), traffics[rank], LABEL), rank)

    results, groups = on_replicas(size, run)
    return results, [traffic.by_label()[LABEL] for traffic in traffics], groups


@pytest.mark.parametrize("size", [2, 3, 4])
class TestAnyLength:
    @pytest.mark.parametrize("shape", [(), (1,), (13,), (9, 31)], ids=str)
    def test_sum(self, size, shape):
        values = [np.random.default_rng(rank).normal(size=shape).astype("float32") for rank in range(size)]
        results, counts, _ = on_collective_groups(size, lambda group, rank: group.sum(tf.constant(values[rank])))
        for result, count in zip(results, counts, strict=True):
            np.testing.assert_allclose(result, np.sum(values, axis=0), rtol=1e-6)
            assert result.shape == shape
            nbytes = values[0].nbytes
            assert (count.gradient_collectives, count.gradient_bytes) == (1, nbytes)
            assert count.wire_bytes == round(2 * (size - 1) / size * nbytes)

    @pytest.mark.parametrize("shape", [(1,), (13,), (9, 31)], ids=str)
    def test_gather_keeps_the_order_of_the_replicas(self, size, shape):
        values = [np.random.default_rng(rank).integers(-99, 99, size=shape, dtype="int32") for rank in range(size)]
        results, counts, _ = on_collective_groups(size, lambda group, rank: group.gather(tf.constant(values[rank])))
        for result, count in zip(results, counts, strict=True):
            np.testing.assert_array_equal(result, np.concatenate(values))
            assert count.wire_bytes == (size - 1) * values[0].nbytes

    @pytest.mark.parametrize("length", [0, 1, 7, 200])
    def test_exchange_is_a_transposition_and_tells_the_position(self, size, length):
        values = np.random.default_rng(0).integers(-99, 99, size=(size, size, length), dtype="int32")
        results, counts, groups = on_collective_groups(size, lambda g, rank: g.exchange(tf.constant(values[rank])))
        for rank, ((received, position), count) in enumerate(zip(results, counts, strict=True)):
            np.testing.assert_array_equal(received, values[:, rank])
            assert int(position) == rank
            # With each slice goes the number of its receiver: 4 bytes.
            assert count.wire_bytes == round((size - 1) * 4 * (length + 1)) == round(groups[rank].wire_bytes)


def test_a_replica_alone_sends_nothing():
    group = CollectiveGroup(ThreadLauncher(ThreadGroup(thread_groups(1)[0]._meeting, 0)), ByteCounters("CPU:0"), LABEL)
    np.testing.assert_array_equal(group.sum(tf.constant([1.0, 2.0])), [1.0, 2.0])
    np.testing.assert_array_equal(group.gather(tf.constant([1, 2])), [1, 2])
    received, position = group.exchange(tf.constant([[3, 4]]))
    np.testing.assert_array_equal(received, [[3, 4]])
    assert int(position) == 0
    assert group._launcher.group.sent == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_two_replicas_add_short_tensors_of_any_dtype(dtype):
    results, _, _ = on_collective_groups(2, lambda group, rank: group.sum(tf.cast([1.5, 2.0 + rank], dtype)))
    for result in results:
        assert result.dtype == dtype
        np.testing.assert_array_equal(tf.cast(result, tf.float32), [3.0, 5.0])


def test_bad_numbers_pass_short_sums():
    values = [[1.0, np.nan], [np.inf, 1.0]]
    results, _, _ = on_collective_groups(2, lambda group, rank: group.sum(tf.constant(values[rank])))
    assert np.isinf(results[0][0]) and np.isnan(results[1][1])
