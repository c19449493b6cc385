"""Frames in a byte stream (a length of four bytes, then the body), and authenticated JSON messages in frames."""

import hmac
import json
import struct
from collections.abc import Mapping
from typing import Any

from tfdist.transport.transport_errors import FrameError
from tfdist.utils.json_messages import json_object

MAX_HANDSHAKE_BYTES = 1024
"""Longest frame body before the other side has proved the token."""

MAX_MESSAGE_BYTES = 4 * 2**20
"""Longest message after the handshake."""

_LENGTH = struct.Struct("!I")
_MAC_BYTES = 32


def encode_frame(body: bytes) -> bytes:
    """Returns the frame of a body."""
    return _LENGTH.pack(len(body)) + body


def decode_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a frame body, or raises a FrameError."""
    try:
        return json_object(body)
    except ValueError as error:
        raise FrameError("the message is not a JSON object") from error


class FrameBuffer:
    """Splits received bytes into frame bodies."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> bytes | None:
        """Returns the next complete body, or None. A FrameError: its length, which arrives first, is too long."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self._max_bytes:
            raise FrameError(f"a message of {length} bytes exceeds the limit of {self._max_bytes}")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body

    def take(self, count: int | None = None) -> bytes:
        """Removes and returns at most `count` unread bytes; all of them by default."""
        data = bytes(self._bytes[:count])
        del self._bytes[: len(data)]
        return data


class MessageCodec:
    """Encodes and decodes the authenticated JSON messages of one connection.

    Each message carries an HMAC of itself and of its number in its direction. A message cannot be changed, dropped,
    repeated, reflected, or moved to another connection without being noticed. `received` are bytes that arrived behind
    the handshake.
    """

    def __init__(self, *, send_key: bytes, receive_key: bytes, received: bytes = b"") -> None:
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0  # messages
        self.buffer = FrameBuffer(max_bytes=MAX_MESSAGE_BYTES + _MAC_BYTES)
        self.buffer.feed(received)

    def encode(self, message: Mapping[str, Any]) -> bytes:
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"The message is too long. Received: {len(body)} bytes. Expected: at most {MAX_MESSAGE_BYTES}."
            )
        frame = encode_frame(_mac(self._send_key, self._sent, body) + body)
        self._sent += 1
        return frame

    def next(self) -> dict[str, Any] | None:
        """Returns the next complete message, or None. A FrameError: the received bytes are not authentic."""
        frame = self.buffer.next()
        if frame is None:
            return None
        mac, body = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, body)):
            raise FrameError("the message is not authentic")
        self._received += 1
        return decode_object(body)


def _mac(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")
