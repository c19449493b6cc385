"""The parts of a global batch that each worker draws where workers have different numbers of replicas."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.training.worker_batches import worker_batches

pytestmark = pytest.mark.usefixtures("cpus")
REPLICAS = (2, 1, 3)


def parts(dataset, rank):
    return [np.asarray(part).tolist() for part in worker_batches(dataset, REPLICAS, rank)[0].as_numpy_iterator()]


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
    return dataset.with_options(options)


@pytest.mark.parametrize("policy", ["AUTO", "DATA"])
def test_each_row_of_each_batch_is_drawn_once_in_the_order_of_the_replicas(policy):
    dataset = with_policy(tf.data.Dataset.range(19).batch(8), policy)  # of 8, 8 and 3 rows
    drawn = [parts(dataset, rank) for rank in range(3)]
    for step, batch in enumerate(dataset.as_numpy_iterator()):
        of_replicas = [
            part for rank, count in enumerate(REPLICAS) for part in drawn[rank][step * count : (step + 1) * count]
        ]
        assert sum(of_replicas, []) == batch.tolist()
        sizes = [len(part) for part in of_replicas]
        assert len(sizes) == 6 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("policy", ["OFF", "FILE", "HINT"])
def test_a_worker_with_separate_data_takes_its_share_of_a_batch(policy):
    dataset = with_policy(tf.data.Dataset.range(16).batch(8), policy)
    drawn = [parts(dataset, rank) for rank in range(3)]
    of_step = [[len(part) for part in drawn[rank][:count]] for rank, count in enumerate(REPLICAS)]
    assert of_step == [[1, 1], [2], [1, 1, 2]]
    assert [sum(drawn[rank], []) for rank in range(3)] == [list(range(16))] * 3


def test_batches_of_different_sizes_are_shared_one_by_one():
    batches = tf.data.Dataset.from_generator(
        lambda: iter([np.arange(6), np.arange(12)]), output_signature=tf.TensorSpec([None], tf.int64)
    )
    assert parts(with_policy(batches, "OFF"), 1) == [[2], [4, 5]]


def test_structures_ragged_and_sparse_rows_are_cut_alike():
    rows = {
        "dense": tf.range(6),
        "ragged": tf.ragged.range(tf.range(6)),
        "sparse": tf.sparse.from_dense(tf.eye(6)),
    }
    dataset = tf.data.Dataset.from_tensor_slices((rows, tf.range(6))).batch(6)
    structure, targets = list(worker_batches(dataset, REPLICAS, 0)[0])[1]
    assert structure["dense"].numpy().tolist() == targets.numpy().tolist() == [1]
    assert structure["ragged"].to_list() == [[0]]
    np.testing.assert_array_equal(tf.sparse.to_dense(structure["sparse"]), np.eye(6)[1:2])


@pytest.mark.parametrize(
    ("dataset", "batches"),
    [
        (lambda: tf.data.Dataset.range(19).batch(8), 9),
        (lambda: tf.data.Dataset.range(19).repeat().batch(8), tf.data.INFINITE_CARDINALITY),
        (lambda: tf.data.Dataset.range(19).filter(lambda _: True).batch(8), tf.data.UNKNOWN_CARDINALITY),
    ],
    ids=["finite", "infinite", "unknown"],
)
def test_the_number_of_batches_stays_known(dataset, batches):
    assert int(worker_batches(dataset(), REPLICAS, 2)[0].cardinality()) == batches


@pytest.mark.parametrize("policy", ["AUTO", "OFF"])
@pytest.mark.parametrize(("size", "of_replica"), [(12, 2), (13, None)])
def test_parts_of_equal_size_keep_a_static_size(policy, size, of_replica):
    dataset = with_policy(tf.data.Dataset.range(40).batch(size, drop_remainder=True), policy)
    batches, _ = worker_batches(dataset, REPLICAS, 2)
    assert batches.element_spec.shape == [of_replica]
    assert [len(part) for part in batches.as_numpy_iterator()][:2] == [2, 2]


def test_a_dataset_without_batches_is_refused():
    with pytest.raises(ValueError, match=r"A dataset must have batches.*Call the `batch` method"):
        worker_batches(tf.data.Dataset.range(3), REPLICAS, 0)
