"""Columns of Arrow as tensors, and errors for what no tensor can hold."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from tfdist.data import from_parquet

pytestmark = pytest.mark.usefixtures("cpus")
DAY = datetime.datetime(2020, 1, 2, 3, 4, 5, 6)


def batch_of(folder, array, **options):
    """The values of a column `c` of one file, in one batch."""
    pq.write_table(pa.table({"c": array}), folder / "file.parquet")
    return next(iter(from_parquet(folder / "file.parquet").dataset(len(array), features="c", **options)))


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "bool"])
def test_numbers_keep_their_types(tmp_path, kind):
    values = np.array([0, 1, 1], kind)
    found = batch_of(tmp_path, pa.array(values))
    assert found.dtype == tf.as_dtype(values.dtype)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array(["a", "é"]), [b"a", "é".encode()]),
        (pa.array([b"\x00a", b""]), [b"\x00a", b""]),
        (pa.array(["a", "a", "b"]).dictionary_encode(), [b"a", b"a", b"b"]),
        (pa.array([DAY], pa.timestamp("us")), [1577934245000006]),
        (pa.array([DAY], pa.timestamp("ns", "UTC")), [1577934245000006]),
        (pa.array([DAY.date()]), [18263]),
        (pa.array([datetime.timedelta(seconds=2)], pa.duration("s")), [2_000_000]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())), [[1, 2], [3, 4]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [3, 4]]),
        (pa.array([[[1], [2]], [[3], [4]]]), [[[1], [2]], [[3], [4]]]),
        (pa.array([["a", "b"]]), [[b"a", b"b"]]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_other_types_have_their_tensors(tmp_path, array, expected):
    assert batch_of(tmp_path, array).numpy().tolist() == expected


def test_a_list_becomes_a_matrix_of_a_given_shape(tmp_path):
    found = batch_of(tmp_path, pa.array([[1, 2, 3, 4]]), shapes={"c": (2, 2)})
    assert found.numpy().tolist() == [[[1, 2], [3, 4]]]


def test_casts_and_fills_are_chosen_by_column(tmp_path):
    prices = pa.array([decimal.Decimal("1.50"), None])
    found = batch_of(tmp_path, prices, dtypes={"c": "float32"}, fill={"c": decimal.Decimal("0")})
    assert found.dtype == tf.float32 and found.numpy().tolist() == [1.5, 0]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([{"a": 1}]), "Select its fields"),
        (pa.array([decimal.Decimal("1.5")]), "dtypes={'c': 'float64'}"),
        (pa.array([None]), "All of its values are null"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())), "No tensor can hold column 'c'"),
    ],
    ids=["struct", "decimal", "null", "map"],
)
def test_types_without_a_tensor_are_refused_before_anything_is_read(tmp_path, array, message):
    with pytest.raises(ValueError, match="No tensor can hold") as error:
        batch_of(tmp_path, array)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([1, 2, None]), r"A value is null: row 2, column 'c' of row group 0 of .*file.parquet"),
        (pa.array([[1, 2], [3]]), r"Lists have different lengths: row 1, column 'c' of row group 0 of .*Received: 1"),
        (pa.array([[1, 2], None]), r"A value is null: row 1"),
        (pa.array([[1, None]]), r"A value is null: value 1 of its lists"),
        (pa.array([1], pa.timestamp("ns")), r"A time cannot be written in microseconds"),
    ],
    ids=["null", "ragged", "no list", "null in a list", "nanoseconds"],
)
def test_values_without_a_tensor_are_named_with_their_row(tmp_path, array, message):
    with pytest.raises(tf.errors.OpError, match=f"(?s){message}"):
        batch_of(tmp_path, array)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "z"}, "There is no column 'z'"),
        ({"features": []}, "Invalid `features`"),
        ({"features": ["a", "s"]}, "Strings cannot be values of a vector"),
        ({"features": "a", "weight": "a"}, "Sample weights belong to labels"),
        ({"features": "a", "fill": {"s": ""}}, "names columns that this dataset does not use"),
        ({"features": "s", "dtypes": {"s": "int32"}}, "cannot be cast"),
        ({"features": "a", "shapes": {"a": (2,)}}, "does not fit its type"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_invalid_choices_of_columns_are_refused(tmp_path, options, message):
    pq.write_table(pa.table({"a": [1], "s": ["x"]}), tmp_path / "file.parquet")
    with pytest.raises(ValueError, match=message):
        from_parquet(tmp_path / "file.parquet").dataset(2, **options)
