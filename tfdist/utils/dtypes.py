"""Numeric dtypes by their names, those of `ml_dtypes` included."""

from typing import Any

import numpy as np


def dtype_named(name: str) -> np.dtype[Any]:
    """Returns a numeric dtype, or bool.

    Raises:
        TypeError: There is none of that name.

    >>> dtype_named("bfloat16").itemsize, dtype_named("float32")
    (2, dtype('float32'))
    """
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name))
    # Rejects datetimes, strings, objects and records. The dtypes of ml_dtypes are of kind V, too, but built in.
    if dtype.kind not in "biufcV" or (dtype.kind == "V" and dtype.isbuiltin != 2):
        raise TypeError(f"{name} is not a numeric dtype")
    return dtype
