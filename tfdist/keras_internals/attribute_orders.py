"""In which order the attributes of an object hold their elements, as numbers that two processes can compare."""

import zlib
from typing import Any

import numpy as np

Orders = dict[str, list[int]]  # by attribute: how many elements, which they are, in which order

_LONGEST_ARRAY = 1 << 20
_LONGEST_LIST = 1 << 15


def attribute_orders(instance: Any) -> Orders:
    """Describes the arrays, lists and tuples of numbers and strings among the attributes of `instance`.

    Very long ones are left out.

    >>> class Data: pass
    >>> one, other = Data(), Data()
    >>> one.indexes, other.indexes = np.array([0, 1, 2]), np.array([2, 0, 1])
    >>> reordered(attribute_orders(one), attribute_orders(other))
    ['indexes']
    """
    found: Orders = {}
    for name, value in list(getattr(instance, "__dict__", {}).items()):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and 1 < value.size <= _LONGEST_ARRAY:
            flat = np.ascontiguousarray(value).reshape(-1)
            bits = flat.view(f"u{flat.itemsize}" if flat.itemsize <= 8 else "u1").astype("u8")
            content = zlib.crc32(np.array([bits.sum(dtype="u8"), (bits * bits).sum(dtype="u8")]).tobytes())
            found[name] = [value.size, content, zlib.crc32(flat.tobytes())]
        elif isinstance(value, list | tuple) and 1 < len(value) <= _LONGEST_LIST:
            if all(isinstance(item, str | bytes | int | float | np.number) for item in value):
                parts = [repr(item) for item in value]
                content, order = (zlib.crc32("\n".join(each).encode()) for each in (sorted(parts), parts))
                found[name] = [len(parts), content, order]
    return found


def reordered(one: Orders, other: Orders) -> list[str]:
    """The attributes that hold the same elements in another order."""
    both = [name for name in one if name in other]
    return [name for name in both if one[name][:2] == other[name][:2] and one[name][2] != other[name][2]]
