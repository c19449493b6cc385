"""The header of an exchange, of fixed size, by which workers notice that they call different exchanges."""

import dataclasses
import math
import struct
from collections.abc import Collection, Sequence

_FORMAT = struct.Struct("!4sBB2xQ24s24s")
HEADER_BYTES = _FORMAT.size
_MAGIC = b"tfdx"
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")
_TEXT_BYTES = 24


def shape_text(shape: Sequence[int]) -> str:
    """Returns the dimensions, or the number of values if the text would be too long for a header."""
    text = "x".join(map(str, shape)) or "1"
    return text if len(text) <= _TEXT_BYTES else str(math.prod(shape))


def differ_in_shape(calls: Collection[str]) -> bool:
    """Whether calls, as text, are the same but for the shapes.

    >>> differ_in_shape(["all-reduce 7 of 2x3 int32 values", "all-reduce 7 of 3x2 int32 values"])
    True
    >>> differ_in_shape(["broadcast 7 of 2x3 int32 values", "broadcast 7 of 2x3 int32 values"])  # of other roots
    False
    """
    without_shapes = {tuple(word for place, word in enumerate(call.split()) if place != 3) for call in calls}
    return len(without_shapes) == 1 < len(set(calls))


@dataclasses.dataclass(frozen=True)
class ExchangeCall:
    """One exchange, as each worker describes it to the others.

    >>> call = ExchangeCall("all-reduce", 0, 7, shape_text((20, 50)), "float32")
    >>> ExchangeCall.decode(call.encode()) == call
    True
    >>> print(call)
    all-reduce 7 of 20x50 float32 values
    """

    kind: str
    root: int
    number: int
    shape: str
    dtype: str

    def encode(self) -> bytes:
        return _FORMAT.pack(
            _MAGIC, KINDS.index(self.kind), self.root % 256, self.number, self.shape.encode(), self.dtype.encode()
        )

    @classmethod
    def decode(cls, header: bytes | memoryview) -> "ExchangeCall | None":
        """Reads a header; returns `None` if the bytes are not a header."""
        magic, kind, root, number, shape, dtype = _FORMAT.unpack(header)
        if magic != _MAGIC or kind >= len(KINDS):
            return None
        texts = (text.rstrip(b"\0").decode(errors="replace") for text in (shape, dtype))
        return cls(KINDS[kind], root, number, *texts)

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of {self.shape} {self.dtype} values"
