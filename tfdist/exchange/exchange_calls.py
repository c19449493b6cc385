"""What a worker exchanges, as a header of fixed size: workers notice by it that they call different exchanges."""

import dataclasses
import struct

_FORMAT = struct.Struct("!4sBB2xQQ24s16x")
HEADER_BYTES = _FORMAT.size
_MAGIC = b"tfdx"
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")
_DTYPE_BYTES = 24


@dataclasses.dataclass(frozen=True)
class ExchangeCall:
    """One exchange, as each worker describes it to the others.

    Args:
        kind: One of `KINDS`.
        root: The rank that sends, of a broadcast; else 0.
        number: How many exchanges came before it on this channel.
        size: How many values each worker passes.
        dtype: The name of their dtype, at most 24 characters.

    >>> call = ExchangeCall("all-reduce", 0, 7, 1000, "float32")
    >>> ExchangeCall.decode(call.encode()) == call
    True
    >>> print(call)
    all-reduce 7 of 1000 float32 values
    """

    kind: str
    root: int
    number: int
    size: int
    dtype: str

    def encode(self) -> bytes:
        """Returns the header, of `HEADER_BYTES`."""
        return _FORMAT.pack(
            _MAGIC, KINDS.index(self.kind), self.root % 256, self.number, self.size, self.dtype.encode()[:_DTYPE_BYTES]
        )

    @classmethod
    def decode(cls, header: bytes | memoryview) -> "ExchangeCall | None":
        """Reads a header; returns `None` if the bytes are none."""
        magic, kind, root, number, size, dtype = _FORMAT.unpack(header)
        if magic != _MAGIC or kind >= len(KINDS):
            return None
        return cls(KINDS[kind], root, number, size, dtype.rstrip(b"\0").decode(errors="replace"))

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of {self.size} {self.dtype} values"
