"""Values of Python and NumPy as JSON, exactly, and back; never a pickle."""

import array
import base64
import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_LONG_TUPLE = 100


def to_json(
    value: Any, tensors: dict[str, np.ndarray] | None = None, name: str = "value", *, compact: bool = False
) -> Any:
    """Returns `value` in terms of JSON, from which `from_json` restores it: the same types, every bit of a float.

    Args:
        value: None, a bool, an int, a float, a str, a scalar or an array of NumPy, a tensor (restored as NumPy's), or
            lists, tuples and dictionaries of these, with strings for keys.
        tensors: Receives the arrays, under names that begin with `name`; if None, arrays become part of the result.
        name: The name of the value in errors.
        compact: Whether arrays, and long tuples of unsigned 32-bit numbers, become base64 text.

    >>> to_json({"best": 0.5, "seen": (1, float("inf"))})
    {'dict': {'best': 0.5, 'seen': {'tuple': [1, {'float': 'inf'}]}}}
    >>> from_json(to_json({"best": 0.5, "seen": (1, float("inf"))}))
    {'best': 0.5, 'seen': (1, inf)}
    """

    def inner(item: Any, part: Any) -> Any:
        return to_json(item, tensors, f"{name}/{part}", compact=compact)

    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list):
        return [inner(item, index) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        # Without a loop in Python: each save encodes the 625 numbers of Python's generator.
        if compact and len(value) > _LONG_TUPLE and set(map(type, value)) == {int}:
            with contextlib.suppress(OverflowError):
                return {"words": _base64(np.array(array.array("I", value), "<u4"))}
        return {"tuple": [inner(item, index) for index, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: inner(item, key) for key, item in value.items()}}
    if not isinstance(value, np.ndarray | np.generic) and hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"scalar": to_json(value.item()), "dtype": value.dtype.name}
    if isinstance(value, np.ndarray) and _are_numbers(value.dtype, as_tensor=tensors is not None):
        if tensors is not None:
            tensors[name] = np.array(value)
            return {"tensor": name}
        if compact:
            return {"base64": _base64(value), "shape": list(value.shape), "dtype": value.dtype.str}
        return {"array": to_json(value.ravel().tolist()), "shape": list(value.shape), "dtype": value.dtype.name}
    raise ValueError(
        f"{name!r} cannot be saved. Received: {value!r}, of type {type(value).__name__}. Expected: None, bool, int, "
        "float, str, a number or an array of NumPy, or lists, tuples and dictionaries (with strings for keys) of these."
    )


def from_json(value: Any, tensors: Mapping[str, np.ndarray] | None = None) -> Any:
    """Returns the value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: from_json(item, tensors) for key, item in value["dict"].items()}
    if "tuple" in value:
        return tuple(from_json(value["tuple"], tensors))
    if "words" in value:
        return tuple(np.frombuffer(base64.b64decode(value["words"]), "<u4").tolist())
    if "float" in value:
        return float(value["float"])
    if "scalar" in value:
        return np.dtype(value["dtype"]).type(from_json(value["scalar"]))
    if "array" in value:
        return np.array(from_json(value["array"]), dtype=value["dtype"]).reshape(value["shape"])
    if "base64" in value:
        return np.frombuffer(base64.b64decode(value["base64"]), value["dtype"]).reshape(value["shape"]).copy()
    return np.array((tensors or {})[value["tensor"]])


def to_text(value: Any) -> str:
    """Returns `value` as compact JSON text: the state of Python's `random` in 3 KB instead of 20 KB.

    >>> import random
    >>> from_text(to_text(random.getstate())) == random.getstate()
    True
    """
    return json.dumps(to_json(value, compact=True))


def from_text(text: str) -> Any:
    """Returns the value that `to_text` was given."""
    return from_json(json.loads(text))


def unsupported_type(value: Any) -> str | None:
    """Returns the name of the first type in `value` that `to_json` rejects; `None` if there is none. Copies nothing.

    >>> unsupported_type({"indexes": [np.arange(3), 1.5, None]}), unsupported_type({"seen": {1, 2}})
    (None, 'set')
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((kind for kind in map(unsupported_type, value) if kind is not None), None)
    if value is None or isinstance(value, bool | str) or type(value) in (int, float) or hasattr(value, "numpy"):
        return None
    is_numeric = isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf"
    return None if is_numeric else type(value).__name__


def _are_numbers(dtype: np.dtype[Any], *, as_tensor: bool) -> bool:
    # Dtypes of ml_dtypes, such as bfloat16, are of kind V. JSON has no name for them that NumPy knows.
    return dtype.kind not in "OSUV" or (as_tensor and dtype.isbuiltin == 2)


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
