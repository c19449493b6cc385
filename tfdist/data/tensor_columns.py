"""Columns of Arrow tables as tensors: dtypes and shapes, casts and values for null, and what no tensor can hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.data.block_source import import_arrow


@dataclass(frozen=True)
class ColumnFormat:
    """How the values of a column become a tensor."""

    column: str  # the name of the column
    dtype: Any  # NumPy's dtype of the tensor; `object` for `tf.string`
    shape: tuple[int, ...] | None  # the shape of one row; None for lists of Arrow of which no length is known
    fill: Any = None  # what replaces null; None: null is an error
    is_cast: bool = False  # whether the user has chosen the dtype

    @property
    def width(self) -> int:
        """The number of values of a row."""
        return int(np.prod(self.shape or (), dtype=np.int64))


def column_format(
    column: str, kind: Any, *, dtype: Any = None, shape: Sequence[int] | None = None, fill: Any = None
) -> ColumnFormat:
    """Returns how a column of an Arrow type becomes a tensor.

    `dtype` and `shape` replace those of the type; `shape` is that of a row, for lists. `fill` replaces null.
    """
    types = import_arrow("pyarrow.types")
    values, natural_shape = _values_and_shape(kind)
    natural = _natural_dtype(values)
    if natural is None and dtype is not None and types.is_decimal(values):
        natural = np.dtype("float64")
    if natural is None or _is_permuted(kind):
        raise ValueError(_refusal(column, kind, values))
    if shape is not None:
        shape = _checked_shape(column, kind, tuple(shape), natural_shape)
    chosen = natural if dtype is None else chosen_dtype(column, dtype, kind, natural)
    check_fill(column, fill, values, kind)
    return ColumnFormat(column, chosen, natural_shape if shape is None else tuple(shape), fill, dtype is not None)


def to_array(values: Any, target: ColumnFormat, place: str, first_row: int = 0) -> np.ndarray:
    """Returns a column as an array of shape `[rows, *target.shape]`, without a copy where Arrow's memory permits.

    Errors name the column, the block and the row.
    """
    array = _without_wrapping(values.combine_chunks())
    where = f"column {target.column!r} of {place}"
    for size in _sizes_to_flatten(array, target):
        array = _flat(_filled(array, target, where, first_row), size, where, first_row)
    array = _filled(array, target, where, first_row)
    flat = _flat_numpy(array, target, where)
    return flat.reshape(-1, *target.shape) if target.shape else flat


def infer_shape(column: str, values: Any, place: str) -> tuple[int, ...]:
    """Returns the shape of the first row of lists that is not null."""
    first = next((row.as_py() for row in values if row.is_valid), None)
    sizes: list[int] = []
    while isinstance(first, list):
        sizes.append(len(first))
        first = first[0] if first else None
    if not sizes:
        raise ValueError(
            f"The lists of column {column!r} have no known length. Received: no list in {place}. Expected: "
            f"`shapes={{{column!r}: (length,)}}`."
        )
    return tuple(sizes)


def _values_and_shape(kind: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Returns the type of the values in lists, and the shape of a row; None if lists may have any length."""
    types, known = import_arrow("pyarrow.types"), True
    sizes: list[int] = []
    while True:
        if types.is_dictionary(kind):
            kind = kind.value_type
        elif hasattr(kind, "storage_type"):  # an extension type: tensors of a fixed shape have one
            if getattr(kind, "shape", None) is not None:
                storage, inner = kind.storage_type, None
                while hasattr(storage, "value_type"):
                    storage = inner = storage.value_type
                return inner, (*sizes, *kind.shape)
            kind = kind.storage_type
        elif types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
            kind = kind.value_type
        elif types.is_list(kind) or types.is_large_list(kind):
            known, kind = False, kind.value_type
        else:
            return kind, tuple(sizes) if known else None


def _natural_dtype(kind: Any) -> Any:
    types = import_arrow("pyarrow.types")
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return np.dtype(kind.to_pandas_dtype())
    if any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        return np.dtype(object)
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return np.dtype(object)
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time(kind):
        return np.dtype("int64")
    return np.dtype("int32") if types.is_date(kind) else None


def _is_permuted(kind: Any) -> bool:
    """Whether tensors are stored with their axes in another order."""
    order = getattr(kind, "permutation", None)
    return order is not None and list(order) != sorted(order)


def _refusal(column: str, kind: Any, values: Any) -> str:
    types = import_arrow("pyarrow.types")
    remedy = "Convert it in the engine, or leave it out of `features`"
    if types.is_decimal(values):
        remedy = f"Choose a dtype, as `dtypes={{{column!r}: 'float64'}}`, or cast it in the engine"
    elif types.is_struct(values):
        remedy = f"Select its fields in the engine, as `{column}.{values[0].name if values.num_fields else 'field'}`"
    elif _is_permuted(kind):
        remedy = "Store the values with their axes in the order of the shape, without a permutation"
    elif types.is_null(values):
        remedy = "All of its values are null: leave it out of `features`, or fill it in the engine"
    return (
        f"No tensor can hold column {column!r}. Received: {kind}. Expected: numbers, bools, strings, bytes, times, or "
        f"lists of one length of these. {remedy}."
    )


def _checked_shape(
    column: str, kind: Any, shape: tuple[int, ...], natural_shape: tuple[int, ...] | None
) -> tuple[int, ...]:
    fits = bool(shape) and natural_shape != () and all(isinstance(size, int) and size > 0 for size in shape)
    if not fits or (natural_shape is not None and np.prod(shape) != np.prod(natural_shape)):
        raise ValueError(
            f"The shape of column {column!r} does not fit its type. Received: shape {shape} for {kind}. Expected: "
            f"positive sizes, and a column of lists{f' of shape {natural_shape}' if natural_shape else ''}."
        )
    return shape


def _without_wrapping(array: Any) -> Any:
    """Returns the values of dictionary-encoded arrays and the storage of extension types."""
    types = import_arrow("pyarrow.types")
    while True:
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        elif hasattr(array.type, "storage_type"):
            array = array.storage
        else:
            return array


def _sizes_to_flatten(array: Any, target: ColumnFormat) -> list[int]:
    """Returns the lengths of lists from the outer to the inner ones, as the rows must have them."""
    types, kind, depth = import_arrow("pyarrow.types"), array.type, 0
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind, depth = kind.value_type, depth + 1
    shape = target.shape or ()
    if depth == len(shape) or depth == 0:
        return list(shape) if depth else []
    # A flat list holds a matrix: tensors of a fixed shape, and `shapes` of several sizes for a list.
    return [*shape[: depth - 1], int(np.prod(shape[depth - 1 :]))]


def _filled(array: Any, target: ColumnFormat, where: str, first_row: int) -> Any:
    compute, types = import_arrow("pyarrow.compute"), import_arrow("pyarrow.types")
    if not array.null_count:
        return array
    is_list = types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type)
    if target.fill is not None and not is_list:
        return compute.fill_null(array, import_arrow().scalar(target.fill, array.type))
    row = compute.index(array.is_null(), True).as_py()
    number = f"row {first_row + row}" if not target.shape or is_list else f"value {row} of its lists"
    remedy = f"`fill={{{target.column!r}: value}}` replaces null" if not is_list else "Drop or fill such rows"
    raise ValueError(
        f"A value is null: {number}, {where}. Received: {array.null_count} of {len(array)} values that are null. "
        f"Expected: a value, as tensors have no null. {remedy}; or do so in the engine."
    )


def _flat(array: Any, size: int, where: str, first_row: int) -> Any:
    compute, types = import_arrow("pyarrow.compute"), import_arrow("pyarrow.types")
    if not types.is_fixed_size_list(array.type) or array.type.list_size != size:
        lengths = compute.list_value_length(array)
        wrong = compute.not_equal(lengths, size)
        row = compute.index(wrong, True).as_py()
        if row >= 0:
            raise ValueError(
                f"Lists have different lengths: row {first_row + row}, {where}. Received: {lengths[row].as_py()} "
                f"values. Expected: {size}, as in the other rows. Pad or cut them in the engine, or give another "
                "length by `shapes`."
            )
    return array.flatten()


def _flat_numpy(array: Any, target: ColumnFormat, where: str) -> np.ndarray:
    arrow, types = import_arrow(), import_arrow("pyarrow.types")
    kind = array.type
    try:
        if target.dtype == object:
            if types.is_string(kind) or types.is_large_string(kind):
                array = array.cast(arrow.large_binary() if types.is_large_string(kind) else arrow.binary())
        elif types.is_date(kind):
            array = array.cast(arrow.date32()).cast(arrow.int32())
        elif types.is_timestamp(kind):
            array = array.cast(arrow.timestamp("us", kind.tz)).cast(arrow.int64())
        elif types.is_duration(kind):
            array = array.cast(arrow.duration("us")).cast(arrow.int64())
        elif types.is_time(kind):
            array = array.cast(arrow.time64("us")).cast(arrow.int64())
        elif types.is_decimal(kind):
            array = array.cast(arrow.float64())
    except arrow.ArrowInvalid as error:
        raise ValueError(
            f"A time cannot be written in microseconds: {where}. Received: {kind}, {error}. Expected: times without "
            "parts of a microsecond. Round them in the engine."
        ) from error
    converted = array.to_numpy(zero_copy_only=False)
    if converted.dtype == target.dtype:
        return converted
    if not target.is_cast:
        raise ValueError(
            f"The type of a column differs between blocks: {where}. Received: {kind}. Expected: the type that becomes "
            f"{target.dtype}. Write all files with the same types."
        )
    return cast_values(converted, target.dtype, where)


_WHOLE = "iu"


def chosen_dtype(column: str, dtype: Any, kind: Any, natural: Any) -> Any:
    """Returns NumPy's dtype that a user has chosen for a column.

    >>> chosen_dtype("price", "float32", "double", np.dtype("float64"))
    dtype('float32')
    """
    try:
        chosen = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
        fits = chosen == natural or (natural.kind != "O" and chosen.kind not in "OSUMm")
    except TypeError:
        chosen, fits = dtype, False
    if not fits:
        raise ValueError(
            f"Column {column!r} cannot be cast. Received: dtype {chosen} for {kind}. Expected: a numeric dtype for a "
            "numeric column. Leave it out of `dtypes`, and convert strings in the engine or by the dataset's `map`."
        )
    return chosen


def check_fill(column: str, fill: Any, values: Any, kind: Any) -> None:
    """Checks that the type of a column whose nulls a value replaces has that value: not 0.5 among integers."""
    if fill is None:
        return
    arrow, types = import_arrow(), import_arrow("pyarrow.types")
    try:
        held = arrow.scalar(fill, values)
        fits = not types.is_integer(values) or held.as_py() == fill
    except (arrow.ArrowException, TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(
            f"The nulls of column {column!r} cannot be filled. Received: {fill!r} in `fill`, for {kind}. Expected: a "
            "value of the column's type. Choose another one, or cast the column in the engine."
        )


def cast_values(values: np.ndarray, dtype: Any, where: str) -> np.ndarray:
    """Returns values of another dtype. Integers that it cannot hold are refused; fractions are cut off, as by NumPy.

    >>> cast_values(np.array([1.7, -2.0]), np.dtype("int8"), "column 'c'")
    array([ 1, -2], dtype=int8)
    """
    if dtype.kind in _WHOLE and values.size and values.dtype.kind in _WHOLE + "f":
        limits = np.iinfo(dtype)
        low, high = values.min(), values.max()
        # Python's integers are exact. NaN is in no range.
        if not (np.isfinite(low) and np.isfinite(high) and limits.min <= int(low) and int(high) <= limits.max):
            raise ValueError(
                f"A cast would change values: {where}. Received: values from {low} to {high}. Expected: values that "
                f"{dtype} can hold, from {limits.min} to {limits.max}. Choose another dtype in `dtypes`, or clean the "
                "column in the engine."
            )
    return values.astype(dtype)
