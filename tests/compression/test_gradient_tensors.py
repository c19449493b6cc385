"""Operations on gradients: finite values whose sum overflows, zeros for replicas without samples."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression.gradient_tensors import all_finite, zeros_unless

pytestmark = pytest.mark.usefixtures("cpus")
LARGE = {"float16": 6e4, "bfloat16": 3e38, "float32": 3e38}


def slices(values):
    return tf.IndexedSlices(tf.constant(values), tf.range(len(values)), tf.constant([9]))


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", LARGE)
def test_all_finite_is_exact(dtype, in_graph):
    check = tf.function(all_finite) if in_graph else all_finite
    large = tf.fill([300], tf.cast(LARGE[dtype], dtype))
    assert not np.isfinite(tf.reduce_sum(large).numpy().astype("float64")), "the sum overflows"
    small = tf.zeros([4], dtype)
    assert check([small, large, -large]).numpy()
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not check([small, tf.cast([1.0, bad], dtype)]).numpy()
        assert not check([large, tf.cast([bad], dtype)]).numpy()


def test_all_finite_of_slices_and_of_nothing():
    assert all_finite([slices([3e38, 3e38])]).numpy() and all_finite([]).numpy()
    assert not all_finite([slices([1.0, float("nan")])]).numpy()


@pytest.mark.parametrize("contributes", [True, False, None])
def test_zeros_unless_a_replica_contributes(contributes):
    nan = tf.constant([1.0, float("nan")])
    flag = None if contributes is None else tf.constant(contributes)
    expected = [0.0, 0.0] if contributes is False else [1.0, float("nan")]
    np.testing.assert_array_equal(zeros_unless(flag, nan).numpy(), expected)
    rows = zeros_unless(flag, slices([1.0, float("nan")]))
    np.testing.assert_array_equal(rows.values.numpy(), expected)
    assert rows.indices.numpy().tolist() == [0, 1]
