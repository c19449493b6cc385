"""Two levels: dense within a worker, compressed between the workers, and the same result everywhere."""

import numpy as np
import numpy_references as references
import pytest
import tensorflow as tf
from replica_threads import ThreadLauncher, on_replicas, thread_groups

from tfdist.collectives import CompressionState
from tfdist.collectives.all_reduce import ReductionContext, ReplicaHierarchy, ReplicaReduction
from tfdist.compression import Policy, Quantize

pytestmark = pytest.mark.usefixtures("cpus")
SHAPES = {"first": (40, 50), "bias": (50,), "second": (64, 50)}
TABLE = (100, 16)


def gradients_of(replica, step):
    random = np.random.default_rng(10 * step + replica)
    return [random.normal(size=shape).astype("float32") for shape in SHAPES.values()]


def rows_of(replica):
    indices = np.arange(replica, 100, 20)  # of the replicas, no two have a row in common
    return np.random.default_rng(replica).normal(size=(len(indices), 16)).astype("float32"), indices


class Cluster:
    """Replicas in threads: `workers` with `local` devices each, their launchers wired as TensorFlow's are."""

    def __init__(self, workers, local, policy):
        self.local, self.size = local, workers * local
        self.all, between = thread_groups(self.size), thread_groups(workers)
        near = [thread_groups(local) for _ in range(workers)]
        self.states = [CompressionState() for _ in range(workers)]
        self.exchanges = [ReductionContext() for _ in range(self.size)]
        self.reductions = []
        for replica in range(self.size):
            worker, device = divmod(replica, local)
            levels = ReplicaHierarchy(
                ThreadLauncher(self.all[replica]),
                ThreadLauncher(between[worker]) if device == 0 else None,
                ThreadLauncher(near[worker][device]),
                worker,
            )
            arguments = (levels, self.exchanges[replica], 0, policy, self.states[worker])
            self.reductions.append(ReplicaReduction(*arguments))

    def step(self, gradients, *, paths=SHAPES, mean=False, contributes=None):
        """What each replica has received of the `[replica][tensor]` gradients."""

        def run(_, replica):
            own = None if contributes is None else tf.constant(contributes[replica])
            tensors = [g if isinstance(g, tf.IndexedSlices) else tf.constant(g) for g in gradients[replica]]
            with self.exchanges[replica].of_gradients(own, list(paths)):
                return self.reductions[replica](tensors, mean=mean, options=None)

        return on_replicas(self.size, run)[0]


@pytest.mark.parametrize(("workers", "local"), [(2, 2), (3, 2)])
def test_dense_within_workers_and_compressed_between_them(workers, local):
    cluster = Cluster(workers, local, Policy(Quantize(8), dense_below=60))
    reference = references.OfBlocks(256, references.integers(127))
    residuals = [[np.zeros(shape, "float32") for shape in SHAPES.values()] for _ in range(workers)]
    for step in range(3):
        gradients = [gradients_of(replica, step) for replica in range(cluster.size)]
        results = cluster.step(gradients)
        of_workers = [
            [np.sum(column, axis=0) for column in zip(*gradients[worker * local : (worker + 1) * local], strict=True)]
            for worker in range(workers)
        ]
        # Buckets are packed from the last tensor.
        corrected = [
            [gradients[p] + residual[p] for p in (2, 0)]
            for gradients, residual in zip(of_workers, residuals, strict=True)
        ]
        (second, first), remainders = reference.exchange(corrected)
        expected = [first, np.sum([worker[1] for worker in of_workers], axis=0), second]
        for result in results:
            for ours, firsts, summed in zip(result, results[0], expected, strict=True):
                np.testing.assert_array_equal(ours, firsts, "replicas differ")
                np.testing.assert_allclose(ours, summed, rtol=1e-5, atol=1e-5)
        for worker, (of_second, of_first) in enumerate(remainders):
            residuals[worker] = [of_first, np.zeros(50), of_second]
            entries = cluster.states[worker].replicas[f"replica_{worker}"].entries
            np.testing.assert_allclose(entries["first"]["residual"], of_first, atol=1e-5)
            np.testing.assert_allclose(entries["second"]["residual"], of_second, atol=1e-5)
            assert len(cluster.states[worker].replicas) == 1, "a worker has one state"


def test_only_the_first_replica_of_a_worker_sends_to_others():
    cluster = Cluster(2, 2, Policy(Quantize(8), dense_below=60))
    cluster.step([gradients_of(replica, 0) for replica in range(4)])
    counts = [reduction.counters.count() for reduction in cluster.reductions]
    payload = Quantize(8).payload_bytes((40, 50)) + Quantize(8).payload_bytes((64, 50)) + 4 * 50
    assert [count.wire_bytes for count in counts] == [payload, 0, payload, 0]
    dense = 4 * sum(np.prod(shape) for shape in SHAPES.values())
    assert counts[0].dense_bytes == dense
    assert [count.updates for count in counts] == [1] * 4
    assert all(group.sent == [] for group in cluster.all), "nothing goes through the group of all"


def test_the_mean_is_over_all_replicas():
    sums, means = (
        Cluster(2, 2, Policy("bf16", dense_below=0)).step([gradients_of(r, 0) for r in range(4)], mean=mean)
        for mean in (False, True)
    )
    np.testing.assert_allclose(means[3][0], sums[3][0] / 4, rtol=1e-6)


def test_a_device_without_samples_adds_nothing():
    gradients = [gradients_of(replica, 0) for replica in range(4)]
    gradients[1] = [np.full_like(gradient, np.nan) for gradient in gradients[1]]
    results = Cluster(2, 2, Policy("bf16", dense_below=0)).step(gradients, contributes=[True, False, True, True])
    expected = gradients[0][0] + gradients[2][0] + gradients[3][0]
    for result in results:
        # Three times the half of the last place of bfloat16, of numbers up to 8.
        np.testing.assert_allclose(result[0], expected, atol=3 * 8 * 2**-9)


def test_bad_numbers_pass_both_levels_and_nothing_is_remembered():
    cluster = Cluster(2, 2, Policy("int8", dense_below=0))
    gradients = [gradients_of(replica, 0) for replica in range(4)]
    cluster.step(gradients)
    before = [
        state.replicas[f"replica_{i}"].entries["first"]["residual"].numpy() for i, state in enumerate(cluster.states)
    ]
    gradients[3][0][7, 7] = np.inf
    for result in cluster.step(gradients):
        assert not np.isfinite(result[0]).all()
    after = [
        state.replicas[f"replica_{i}"].entries["first"]["residual"].numpy() for i, state in enumerate(cluster.states)
    ]
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("method", ["bf16", None])
def test_rows_reach_all_devices(method):
    policy = Policy({"table": method, ".*": "int8"}, dense_below=0)
    rows = [rows_of(replica) for replica in range(4)]
    slices = [[tf.IndexedSlices(tf.constant(v), tf.constant(i), tf.constant(TABLE, tf.int64))] for v, i in rows]
    expected = np.zeros(TABLE, "float32")
    for values, indices in rows:
        np.add.at(expected, indices, values)
    for (summed,) in Cluster(2, 2, policy).step(slices, paths=["table"]):
        dense = np.zeros(TABLE, "float32")
        dense[summed.indices.numpy()] = summed.values.numpy()
        assert len(set(summed.indices.numpy().tolist())) == len(summed.indices) == 20
        np.testing.assert_allclose(dense, expected, rtol=2**-8)


def test_anything_else_than_gradients_goes_through_the_group_of_all():
    cluster = Cluster(2, 2, Policy("int8", dense_below=0))
    values = [np.float32([replica, 1]) for replica in range(4)]
    results, _ = on_replicas(4, lambda _, r: cluster.reductions[r]([tf.constant(values[r])], mean=False, options=None))
    for (summed,) in results:
        np.testing.assert_array_equal(summed, [6, 4])
    assert cluster.reductions[0].counters.count().other_collectives == 1
