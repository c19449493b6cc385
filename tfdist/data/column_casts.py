"""Casts of columns to chosen dtypes, and values that replace null: neither may change a value without a word."""

from typing import Any

import numpy as np

from tfdist.data.arrow_import import import_arrow

_WHOLE = "iu"


def chosen_dtype(column: str, dtype: Any, kind: Any, natural: Any) -> Any:
    """Returns NumPy's dtype that a user has chosen for a column.

    >>> chosen_dtype("price", "float32", "double", np.dtype("float64"))
    dtype('float32')

    Args:
        column: The name of the column.
        dtype: A dtype of NumPy, its name, or a `tf.DType`.
        kind: The type of the column in Arrow.
        natural: The dtype without a choice.

    Raises:
        ValueError: It is no dtype of numbers, or the column holds strings.
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
    """Checks that a value fits a column whose nulls it replaces.

    Args:
        column: The name of the column.
        fill: The value, None for none.
        values: The type of the column's values in Arrow.
        kind: The type of the column in Arrow.

    Raises:
        ValueError: The type has no such value: 0.5 among integers.
    """
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

    Args:
        values: Numbers or bools.
        dtype: The dtype.
        where: The column and its block, for messages.

    Raises:
        ValueError: A value is outside of the range of an integer dtype, or no number.
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
