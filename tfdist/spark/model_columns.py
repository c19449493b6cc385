"""Columns of a DataFrame, and which of them become which inputs and targets of a model, or what its outputs become."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.data.parquet_files import quoted

_PARTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """An input of a model, as the tensors of its columns must be."""

    columns: tuple[str, ...]  # its columns; several are side by side in one vector
    dtype: str | None  # NumPy's dtype to which numbers are cast, or None: as they are
    shape: tuple[int, ...] | None  # the shape of a row, or None: that of the column

    def array(self, values: Sequence[Any]) -> np.ndarray:
        """Returns the values of a batch, none of which is null; rows of a column must have one shape."""
        parts = [_dense(name, column) for name, column in zip(self.columns, values, strict=True)]
        array = parts[0]
        if len(parts) > 1:
            array = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        if self.dtype is not None and array.dtype != object:
            array = array.astype(self.dtype)
        fits = self.shape is not None and array.ndim > 1 and int(np.prod(array.shape[1:])) == int(np.prod(self.shape))
        return array.reshape(len(array), *self.shape) if fits and self.shape is not None else array


def input_specs(model: Any, feature_cols: Sequence[str]) -> list[InputSpec]:
    """Returns the inputs of a model, by the names that its columns have in common with them, or by their order.

    A model without declared inputs has one input. There is one column for each input, or all are of one input.
    """
    # A subclassed model has none, and one that was not built raises an error.
    inputs = list(getattr(model, "inputs", None) or []) if getattr(model, "built", True) else []
    if len(inputs) <= 1:
        groups = [tuple(feature_cols)]
    elif len(inputs) == len(feature_cols):
        names = {tensor.name for tensor in inputs}
        keys = [tensor.name for tensor in inputs] if names == set(feature_cols) else list(feature_cols)
        groups = [(key,) for key in keys]
    else:
        raise ValueError(
            f"The model has another number of inputs than there are columns. Received: feature_cols="
            f"{list(feature_cols)} for {len(inputs)} inputs, {[tensor.name for tensor in inputs]}. Expected: one "
            "column for each input, in the same order. Put columns of one input into one, by VectorAssembler."
        )
    if not inputs:
        return [InputSpec(columns, None, None) for columns in groups]
    return [
        InputSpec(columns, _dtype(tensor), _shape(tensor) if len(columns) == 1 else None)
        for columns, tensor in zip(groups, inputs, strict=True)
    ]


def combined(parts: Sequence[Any]) -> Any:
    """Returns what a model is called with: a tensor, or a tuple with a tensor for each input."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def ordered_outputs(outputs: Any, label_cols: Sequence[str]) -> list[Any]:
    """Returns the outputs of a model in the order of the labels, if they have the same names."""
    if isinstance(outputs, Mapping):
        names = label_cols if set(label_cols) == set(outputs) else sorted(outputs)
        return [outputs[name] for name in names]
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def default_output_type(shape: Sequence[int | None]) -> str:
    """Returns the type of an output's column: a number where a row has one, else an array.

    >>> default_output_type((1,)), default_output_type((10,))
    ('double', 'array')
    """
    return "double" if shape in ((), (1,), [], [1]) else "array"


def _dense(name: str, values: Any) -> np.ndarray:
    rows = list(values)
    if any(row is None for row in rows):
        raise ValueError(
            f"A feature is null. Received: null in column {name!r}. Expected: a value in each row. Call "
            "DataFrame.dropna or fillna before."
        )
    first_row = rows[0]
    if not isinstance(first_row, np.ndarray | list):
        return np.asarray(values)
    try:
        nested = (
            isinstance(first_row, np.ndarray) and first_row.dtype == object and isinstance(first_row[0], np.ndarray)
        )
        return np.stack([np.stack(list(row)) for row in rows] if nested else [np.asarray(row) for row in rows])
    except ValueError as error:
        raise ValueError(
            f"The rows of a feature have different lengths. Received: {error}, in column {name!r}. Expected: arrays "
            "of one length. Pad or cut them before."
        ) from error


def _dtype(tensor: Any) -> str | None:
    return None if str(tensor.dtype) == "string" else str(tensor.dtype)


def _shape(tensor: Any) -> tuple[int, ...] | None:
    shape = tuple(tensor.shape)[1:]
    return shape if shape and None not in shape else None


def column(name: str) -> Any:
    """Returns a column by its whole name, which may contain dots."""
    from pyspark.sql import functions

    return functions.col(quoted(name))


def check_columns(df: Any, columns: Sequence[str], argument: str) -> None:
    """Checks that columns exist."""
    if missing := [name for name in columns if name not in df.columns]:
        raise ValueError(
            f"The DataFrame does not have these columns: {missing}. Received: {argument}={list(columns)}. Expected: "
            f"some of {df.columns}. Correct `{argument}`."
        )


def as_array(df: Any, name: str) -> Any:
    """Returns a column; a column of MLlib's vectors becomes arrays of float32."""
    from pyspark.ml.functions import vector_to_array

    is_vector = type(df.schema[name].dataType).__name__ == "VectorUDT"
    return vector_to_array(column(name), "float32") if is_vector else column(name)


def split(df: Any, validation: Any, columns: Sequence[str], seed: int) -> tuple[Any, Any]:
    """Returns the rows to train on, and those to validate with or None; both have only the given columns.

    A fraction is chosen by a hash of the values, so computing the DataFrame again splits it in the same way, and equal
    rows are on the same side. `validation` may also be None, or a column that is true, or not 0, in such rows.
    """
    from pyspark.sql import functions

    selected = [as_array(df, name).alias(name) for name in columns]
    if validation is None or validation == 0:
        return df.select(*selected), None
    if isinstance(validation, str):
        check_columns(df, [validation], "validation")
        chosen = functions.coalesce(column(validation).cast("boolean"), functions.lit(False))
    elif isinstance(validation, int | float) and 0 < validation < 1:
        parts = functions.xxhash64(functions.lit(seed), *(as_array(df, name) for name in columns))
        chosen = functions.pmod(parts, functions.lit(_PARTS)) < round(validation * _PARTS)
    else:
        raise ValueError(
            f"Invalid `validation`. Received: validation={validation!r}. Expected: a fraction from 0 to less than 1, "
            "or the name of a column that is true in the rows of the validation."
        )
    return df.filter(~chosen).select(*selected), df.filter(chosen).select(*selected)


def fingerprint(df: Any, extra: str) -> str:
    """Returns a hash of the rows in any order, and of a text. It computes the DataFrame."""
    from pyspark.sql import functions

    rows = functions.xxhash64(*(column(name) for name in df.columns)).cast("decimal(38,0)")
    totals = df.agg(functions.count(functions.lit(1)), functions.sum(rows)).first()
    return hashlib.sha256(f"{df.schema.json()} {totals[0]} {totals[1]} {extra}".encode()).hexdigest()
