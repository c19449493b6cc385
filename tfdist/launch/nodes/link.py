"""An authenticated connection that never blocks."""

import contextlib
import hmac
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.launch.nodes.frames import MAX_MESSAGE_BYTES, FrameBuffer, FrameError, framed
from tfdist.launch.nodes.handshake import decode_object

_MAC_BYTES = 32
_MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES


class LinkClosed(Exception):
    """The other side is gone, or cannot be trusted any more; the text says why."""


class Link:
    """Sends and receives JSON objects over a connection whose two sides have proved the token.

    Each message carries an HMAC of itself and of its number in its direction: none can be changed, left out, repeated,
    moved to another connection, or sent back.

    Args:
        connection: A connected stream socket; the link closes it.
        send_key: Authenticates what is sent.
        receive_key: Authenticates what arrives.
        received: What has arrived behind the handshake already.
    """

    def __init__(
        self, connection: socket.socket, *, send_key: bytes, receive_key: bytes, received: bytes = b""
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0  # messages
        self._buffer = FrameBuffer(max_bytes=MAX_MESSAGE_BYTES + _MAC_BYTES)
        self._buffer.feed(received)
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    @property
    def local_address(self) -> str:
        """The address of this side."""
        return plain_address(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """The address of the other side."""
        return plain_address(self._socket.getpeername()[0])

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, or keeps it until the connection takes it.

        Raises:
            LinkClosed: If the other side is gone or does not read.
        """
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"The message is too long. Received: {len(body)} bytes. Expected: {MAX_MESSAGE_BYTES}.")
        self._unsent += framed(_mac(self._send_key, self._sent, body) + body)
        self._sent += 1
        self.flush()
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise LinkClosed("it does not read what it is sent")

    def flush(self) -> None:
        """Sends what the connection takes.

        Raises:
            LinkClosed: If the other side is gone.
        """
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkClosed(error.strerror or str(error)) from error

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yields the messages that have arrived.

        Raises:
            LinkClosed: After the last of them, if the other side has closed the connection; at once, if what arrived
                is no authentic message.
        """
        ending = ""
        while not ending:
            try:
                data = self._socket.recv(65_536)
            except BlockingIOError:
                break
            except OSError as error:
                ending = error.strerror or str(error)
                break
            self._buffer.feed(data)
            if not data:
                ending = "the connection was closed"
            yield from self._messages()
        yield from self._messages()
        if ending:
            raise LinkClosed(ending)

    def close(self) -> None:
        """Closes the connection. What is unsent is lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _messages(self) -> Iterator[dict[str, Any]]:
        try:
            while (frame := self._buffer.next()) is not None:
                mac, body = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
                if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, body)):
                    raise FrameError("a message that is not authentic")
                self._received += 1
                yield decode_object(body)
        except FrameError as error:
            raise LinkClosed(f"it sent {error}") from error


def plain_address(address: str) -> str:
    """Returns an IPv4 address that came in over IPv6 as what it is, without the zone of a link-local one.

    >>> plain_address("::ffff:10.0.0.1"), plain_address("fe80::1")
    ('10.0.0.1', 'fe80::1')
    """
    return address.removeprefix("::ffff:") if "." in address else address


def tune(connection: socket.socket) -> None:
    """Sends small messages at once, and has the kernel notice a host that is gone."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _mac(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")
