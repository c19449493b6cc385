"""Columns of a DataFrame: checks, MLlib's vectors, the split for the validation, and a fingerprint of the rows."""

import hashlib
from collections.abc import Sequence
from typing import Any

_PARTS = 1 << 20


def column(name: str) -> Any:
    """Returns a column by its whole name, which may contain dots."""
    from pyspark.sql import functions

    return functions.col(f"`{name.replace('`', '``')}`")


def check_columns(df: Any, columns: Sequence[str], argument: str) -> None:
    """Checks that columns exist.

    Raises:
        ValueError: If one does not; the message names it.
    """
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
    rows are on the same side.

    Args:
        df: A DataFrame.
        validation: A fraction from 0 to less than 1; a column that is true, or not 0, in rows of the validation; None.
        columns: The columns to keep.
        seed: The seed of the hash.

    Raises:
        ValueError: If `validation` is something else, or there is no such column.
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
