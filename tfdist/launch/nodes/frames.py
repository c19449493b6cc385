"""Messages as pieces of a byte stream: a length of four bytes, then that many bytes."""

import struct

MAX_GREETING_BYTES = 1024
"""The longest piece before the other side has proved the token."""

MAX_MESSAGE_BYTES = 4 * 2**20
"""The longest piece after that."""

_LENGTH = struct.Struct("!I")


class FrameError(ValueError):
    """What arrived is no message."""


def framed(body: bytes) -> bytes:
    r"""Returns a piece as it is sent.

    >>> framed(b"{}")
    b'\x00\x00\x00\x02{}'
    """
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    r"""Cuts what arrives into pieces.

    Args:
        max_bytes: The longest piece that is taken.

    >>> buffer = FrameBuffer(max_bytes=100)
    >>> buffer.feed(b"\x00\x00\x00\x02{}\x00")
    >>> buffer.next(), buffer.next()
    (b'{}', None)
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = bytearray()

    @property
    def rest(self) -> bytes:
        """What waits: it makes no whole piece yet, or nobody has asked for it."""
        return bytes(self._bytes)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._bytes += data

    def next(self) -> bytes | None:
        """Returns the next whole piece, or None.

        Raises:
            FrameError: If it is longer than allowed. Told by its length alone, before it has arrived.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self.max_bytes:
            raise FrameError(f"a message of {length} bytes, more than {self.max_bytes}")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body
