"""Buckets are filled from the last gradient, closed by size, and of one dtype each."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives.buckets import fill_buckets
from tfdist.compression.gradient_tensors import flatten, unflatten

pytestmark = pytest.mark.usefixtures("cpus")


def positions(tensors, bucket_bytes, **options):
    return fill_buckets(tensors, bucket_bytes, **options)


def test_last_gradients_come_first():
    assert positions([tf.zeros([2])] * 5, bucket_bytes=16) == [(4, 3), (2, 1), (0,)]


def test_a_bucket_is_closed_when_it_is_full_and_never_splits_a_tensor():
    tensors = [tf.zeros([1]), tf.zeros([100]), tf.zeros([1])]
    assert positions(tensors, bucket_bytes=8, packs_large=True) == [(2, 1), (0,)]


def test_a_large_tensor_is_sent_alone_and_its_neighbours_together():
    assert positions([tf.zeros([1]), tf.zeros([100]), tf.zeros([1])], bucket_bytes=100) == [(1,), (2, 0)]
    layers = [tf.zeros([2**18]), tf.zeros([10]), tf.zeros([2**18 - 1]), tf.zeros([10])]  # 1 MiB and 4 bytes less
    assert positions(layers, bucket_bytes=4 * 2**20) == [(3, 2), (1,), (0,)]


def test_buckets_are_in_the_order_in_which_they_are_complete():
    tensors = [tf.zeros([1]), tf.zeros([4]), tf.zeros([1], tf.float16)]
    assert positions([*tensors, tf.zeros([1])], bucket_bytes=16) == [(2,), (1,), (3, 0)]


def test_the_first_bucket_is_closed_early():
    tensors = [tf.zeros([2**17])] * 10  # half a MiB each
    assert positions(tensors, bucket_bytes=2 * 2**20) == [(9, 8), (7, 6, 5, 4), (3, 2, 1, 0)]


def test_zero_means_one_bucket():
    assert positions([tf.zeros([1000])] * 3, bucket_bytes=0) == [(2, 1, 0)]


def test_dtypes_do_not_mix():
    tensors = [tf.zeros([1]), tf.zeros([1], tf.float16), tf.zeros([1]), tf.zeros([1], tf.float16)]
    assert sorted(positions(tensors, bucket_bytes=0)) == [(2, 0), (3, 1)]


def test_no_tensors_make_no_buckets():
    assert positions([], bucket_bytes=8) == []


def test_every_tensor_is_in_one_bucket_once():
    random = np.random.default_rng(0)
    tensors = [tf.zeros([int(size)]) for size in random.integers(0, 50, size=40)]
    for bucket_bytes in (0, 1, 64, 1000):
        flat = [position for bucket in positions(tensors, bucket_bytes) for position in bucket]
        assert sorted(flat) == list(range(40))


def test_a_tensor_of_unknown_shape_has_a_bucket_to_itself():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def check(unknown):
        assert positions([tf.zeros([1]), unknown, tf.zeros([1])], bucket_bytes=0) == [(1,), (2, 0)]
        (restored,) = unflatten(flatten([unknown]), [unknown])
        return restored

    assert check(tf.ones([3, 2])).shape == (3, 2)


@pytest.mark.parametrize("shapes", [[()], [(2, 3)], [(2, 3), (), (0,), (4,)]])
def test_unflatten_restores_what_flatten_has_packed(shapes):
    random = np.random.default_rng(0)
    tensors = [tf.constant(random.normal(size=shape), tf.float32) for shape in shapes]
    restored = unflatten(flatten(tensors), tensors)
    for tensor, back in zip(tensors, restored, strict=True):
        np.testing.assert_array_equal(tensor, back)
        assert tensor.shape == back.shape
