"""Sums over replicas against NumPy: dense, sparse, mixed, and of replicas that have nothing to give."""

import numpy as np
import pytest
import tensorflow as tf
from replica_threads import on_replicas

from tfdist.collectives.all_reduce import ReductionContext, sum_tensors
from tfdist.collectives.byte_counters import GRADIENTS, OTHER
from tfdist.compression.gradient_tensors import sum_duplicate_rows

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [0, 8, 10**6])
def test_dense_sums_keep_their_order_and_shapes(size, bucket_bytes):
    shapes = [(3,), (2, 2), (), (5, 1)]
    random = np.random.default_rng(size)
    values = [[random.normal(size=shape).astype("float32") for shape in shapes] for _ in range(size)]
    results, groups = on_replicas(size, lambda group, rank: sum_tensors(values[rank], group, bucket_bytes))
    for position in range(len(shapes)):
        expected = np.sum([replica[position] for replica in values], axis=0)
        for result in results:
            np.testing.assert_allclose(result[position], expected, rtol=1e-6)
            assert result[position].shape == shapes[position]
    if bucket_bytes == 0:
        assert len(groups[0].sent) == 1, "one bucket is one collective"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sparse_sums_equal_dense_ones(size):
    random = np.random.default_rng(size)
    rows = [4, 0, 7][:size]  # replicas may have different numbers of rows, or none
    slices = []
    for count in rows:
        indices = random.integers(0, 5, size=count)
        values = random.normal(size=(count, 3)).astype("float32")
        slices.append(tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([5, 3], tf.int64)))
    expected = np.zeros((5, 3), "float32")
    for replica in slices:
        np.add.at(expected, replica.indices.numpy(), replica.values.numpy())

    results, _ = on_replicas(size, lambda group, rank: sum_tensors([slices[rank]], group, 0)[0])
    for result in results:
        assert len(set(result.indices.numpy().tolist())) == len(result.indices), "an index stands twice"
        dense = np.zeros((5, 3), "float32")
        dense[result.indices.numpy()] = result.values.numpy()
        np.testing.assert_allclose(dense, expected, rtol=1e-6, atol=1e-7)


def test_sparse_sums_send_rows_not_the_table():
    table_rows, columns, touched = 10_000, 8, 3
    slices = tf.IndexedSlices(tf.ones([touched, columns]), tf.constant([1, 5, 9]), tf.constant([table_rows, columns]))
    _, groups = on_replicas(2, lambda group, rank: sum_tensors([slices], group, 0))
    sent_bytes = sum(array.nbytes for array in groups[0].sent)
    assert sent_bytes == 4 + touched * 4 + touched * columns * 4  # count of rows, indices, values


def test_a_replica_without_samples_sends_zeros_instead_of_what_backpropagation_made_of_nothing():
    values = [np.array([1.0, 2.0], "float32"), np.array([np.nan, np.inf], "float32")]

    def reduce(group, rank):
        return sum_tensors([values[rank]], group, 0, contributes=tf.constant(rank == 0))[0]

    results, _ = on_replicas(2, reduce)
    np.testing.assert_array_equal(results[1], [1.0, 2.0])


def test_a_replica_without_samples_sends_rows_of_zeros():
    rows = [
        tf.IndexedSlices(tf.constant([[number]]), tf.constant([2]), tf.constant([4, 1])) for number in (1.0, np.nan)
    ]

    results, _ = on_replicas(
        2, lambda group, rank: sum_tensors([rows[rank]], group, 0, contributes=tf.constant(rank == 0))[0]
    )
    assert [result.values.numpy().tolist() for result in results] == [[[1.0]], [[1.0]]]


def test_nan_of_a_replica_with_samples_reaches_all():
    values = [np.array([1.0], "float32"), np.array([np.nan], "float32")]
    results, _ = on_replicas(2, lambda group, rank: sum_tensors([values[rank]], group, 0)[0])
    assert np.isnan(results[0]).all()


def test_duplicate_rows_are_added_up_before_anyone_squares_them():
    slices = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([2, 2]), tf.constant([4, 1]))
    assert float(tf.norm(sum_duplicate_rows(slices).values)) == 7.0  # and not 5


def test_an_exchange_of_gradients_ends_also_by_an_error():
    exchange = ReductionContext()
    with pytest.raises(RuntimeError), exchange.of_gradients(tf.constant(True)):
        assert exchange.kind == GRADIENTS
        raise RuntimeError
    assert (exchange.kind, exchange.contributes) == (OTHER, None)
