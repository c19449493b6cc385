"""No value changes without a word: casts, values that replace null, Spark's timestamps, tensors with other axes."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from tfdist.data import from_parquet

pytestmark = pytest.mark.usefixtures("cpus")


def batch_of(folder, array, write=None, **options):
    pq.write_table(pa.table({"c": array}), folder / "file.parquet", **(write or {}))
    return next(iter(from_parquet(folder / "file.parquet").dataset(len(array), features="c", **options)))


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (pa.array([1, 300]), "int8"),
        (pa.array([2**40]), "int32"),
        (pa.array([-1]), "uint8"),
        (pa.array([2**64 - 1], pa.uint64()), "int64"),
        (pa.array([2.0**63]), "int64"),
        (pa.array([1.0, float("nan")]), "int32"),
        (pa.array([[1, 2**31]]), "int32"),
    ],
    ids=str,
)
def test_integers_that_a_dtype_cannot_hold_are_refused(tmp_path, array, dtype):
    with pytest.raises(tf.errors.OpError, match="A cast would change values: column 'c' of row group 0"):
        batch_of(tmp_path, array, dtypes={"c": dtype})


def test_casts_that_fit(tmp_path):
    assert batch_of(tmp_path, pa.array([-128, 127]), dtypes={"c": tf.int8}).numpy().tolist() == [-128, 127]
    assert batch_of(tmp_path, pa.array([1.7, -1.7]), dtypes={"c": "int32"}).numpy().tolist() == [1, -1]
    assert batch_of(tmp_path, pa.array([True]), dtypes={"c": "float32"}).numpy().tolist() == [1]


@pytest.mark.parametrize("dtype", ["str", "datetime64[us]", "float33", object])
def test_a_dtype_without_numbers_is_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match="Column 'c' cannot be cast"):
        batch_of(tmp_path, pa.array([1]), dtypes={"c": dtype})


@pytest.mark.parametrize(("kind", "fill"), [("int64", 0.5), ("int8", 300), ("int64", "a"), ("float64", "a")])
def test_null_is_replaced_by_values_of_the_column_only(tmp_path, kind, fill):
    array = pa.array([1, None], kind)
    with pytest.raises(ValueError, match="The nulls of column 'c' cannot be filled"):
        batch_of(tmp_path, array, fill={"c": fill})
    assert batch_of(tmp_path, array, fill={"c": 2.0}).numpy().tolist() == [1, 2]


def test_timestamps_of_spark_may_be_far_away(tmp_path):
    times = [datetime.datetime(9999, 12, 31), datetime.datetime(1, 1, 1), datetime.datetime(2020, 1, 1, 1, 1, 1, 5)]
    array = pa.array(times, pa.timestamp("us"))
    found = batch_of(tmp_path, array, {"use_deprecated_int96_timestamps": True})
    assert found.numpy().tolist() == array.cast(pa.int64()).to_pylist()


def test_tensors_with_permuted_axes_are_refused(tmp_path):
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3), permutation=[1, 0])
    storage = pa.array([[1, 2, 3, 4, 5, 6]], pa.list_(pa.int32(), 6))
    with pytest.raises(ValueError, match="without a permutation"):
        batch_of(tmp_path, pa.ExtensionArray.from_storage(kind, storage))


@pytest.mark.parametrize("shuffle", [True, np.True_])
def test_true_shuffles_rows_of_several_blocks(tmp_path, shuffle):
    array = pa.array(range(40))
    found = batch_of(tmp_path, array, {"row_group_size": 10}, shuffle=shuffle, seed=1).numpy()
    assert len(set(found[:10] // 10)) > 1
    with pytest.raises(ValueError, match="`shuffle`"):
        batch_of(tmp_path, array, shuffle=2.5)
