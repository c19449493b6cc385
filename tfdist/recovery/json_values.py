"""Values of Python and NumPy as JSON, exactly, and back; never a pickle."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def to_json(value: Any, tensors: dict[str, np.ndarray] | None = None, name: str = "value") -> Any:
    """Returns `value` in terms of JSON, from which `from_json` makes it again: the same types, every bit of a float.

    Args:
      value: None, a bool, an int, a float, a str, a scalar or an array of NumPy, a tensor (which comes back as
        NumPy's), or lists, tuples and dictionaries of these, with strings for keys.
      tensors: where arrays are put, under names that begin with `name`; without it they are written out.
      name: says in an error what the value is.

    Raises:
      ValueError: it is something else.

    >>> to_json({"best": 0.5, "seen": (1, float("inf"))})
    {'dict': {'best': 0.5, 'seen': {'tuple': [1, {'float': 'inf'}]}}}
    >>> from_json(to_json({"best": 0.5, "seen": (1, float("inf"))}))
    {'best': 0.5, 'seen': (1, inf)}
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list):
        return [to_json(item, tensors, f"{name}/{index}") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [to_json(item, tensors, f"{name}/{index}") for index, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: to_json(item, tensors, f"{name}/{key}") for key, item in value.items()}}
    if not isinstance(value, np.ndarray | np.generic) and hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"scalar": to_json(value.item()), "dtype": value.dtype.name}
    if isinstance(value, np.ndarray) and _are_numbers(value.dtype, as_tensor=tensors is not None):
        if tensors is not None:
            tensors[name] = np.array(value)
            return {"tensor": name}
        return {"array": to_json(value.ravel().tolist()), "shape": list(value.shape), "dtype": value.dtype.name}
    raise ValueError(
        f"{name!r} cannot be saved. Received: {value!r}, of type {type(value).__name__}. Expected: None, bool, int, "
        "float, str, a number or an array of NumPy, or lists, tuples and dictionaries (with strings for keys) of these."
    )


def _are_numbers(dtype: np.dtype[Any], *, as_tensor: bool) -> bool:
    # Those of ml_dtypes, such as bfloat16, are of kind V. JSON has no name by which NumPy would know them.
    return dtype.kind not in "OSUV" or (as_tensor and dtype.isbuiltin == 2)


def from_json(value: Any, tensors: Mapping[str, np.ndarray] | None = None) -> Any:
    """The value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: from_json(item, tensors) for key, item in value["dict"].items()}
    if "tuple" in value:
        return tuple(from_json(value["tuple"], tensors))
    if "float" in value:
        return float(value["float"])
    if "scalar" in value:
        return np.dtype(value["dtype"]).type(from_json(value["scalar"]))
    if "array" in value:
        return np.array(from_json(value["array"]), dtype=value["dtype"]).reshape(value["shape"])
    return np.array((tensors or {})[value["tensor"]])
