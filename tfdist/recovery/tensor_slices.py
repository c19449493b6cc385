"""Parts of tensors in the files of checkpoints, as TensorFlow describes them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSlice:
    """The elements of a tensor from `begin` to before `end` along one axis, and all elements along the others.

    Attributes:
        axis: The axis, from 0.
        begin: The first position.
        end: The position after the last one.
    """

    axis: int
    begin: int
    end: int


def slice_spec(shape: Sequence[int], *parts: TensorSlice | None) -> str | None:
    """Returns the intersection of parts of a tensor as `SaveV2` and `RestoreV2` take it; None if it has no elements.

    Args:
        shape: The shape of the complete tensor.
        *parts: Parts of it; None is all of it.

    >>> slice_spec([8, 16], TensorSlice(1, 0, 8))
    '8 16 -:0,8'
    >>> slice_spec([8, 16], TensorSlice(1, 0, 8), TensorSlice(0, 4, 8))
    '8 16 4,4:0,8'
    >>> slice_spec([8, 16], TensorSlice(1, 0, 8), TensorSlice(1, 8, 16)) is None
    True
    >>> slice_spec([8, 16], None)
    ''
    """
    ranges = [(0, size) for size in shape]
    known = [part for part in parts if part is not None]
    for part in known:
        begin, end = ranges[part.axis]
        ranges[part.axis] = max(begin, part.begin), min(end, part.end)
        if ranges[part.axis][0] >= ranges[part.axis][1]:
            return None
    if not known:
        return ""
    pairs = zip(ranges, shape, strict=True)
    texts = ["-" if (begin, end) == (0, size) else f"{begin},{end - begin}" for (begin, end), size in pairs]
    return f"{' '.join(map(str, shape))} {':'.join(texts)}"
