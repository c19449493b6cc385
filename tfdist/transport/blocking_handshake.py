"""Runs a handshake over a blocking socket."""

import socket
import time
from collections.abc import Callable

from tfdist.transport.authenticated_messages import MAX_HANDSHAKE_BYTES, FrameBuffer, encode_frame
from tfdist.transport.handshake import ClientHandshake, Credentials, ServerHandshake, SessionKeys
from tfdist.transport.transport_errors import ConnectionClosedError, HandshakeError

BlockingHandshake = Callable[[socket.socket, Credentials, float], tuple[SessionKeys, bytes]]


def client_handshake(connection: socket.socket, credentials: Credentials, deadline: float) -> tuple[SessionKeys, bytes]:
    """Runs the client's side over a blocking socket.

    Args:
        connection: The connected socket.
        credentials: Of this process.
        deadline: Monotonic time at which the handshake must be complete.

    Returns:
        The keys, and the bytes that arrived behind the handshake.

    Raises:
        TransportError: If the handshake fails.
        OSError: If the connection fails, or the deadline passes.
    """
    handshake, frames = ClientHandshake(credentials), _BlockingFrames(connection, deadline)
    frames.send(handshake.hello)
    proof = handshake.prove(frames.receive())
    try:
        frames.send(proof)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the answer that the server sent before it closed says why
    return handshake.finish(frames.receive()), frames.rest()


def server_handshake(connection: socket.socket, credentials: Credentials, deadline: float) -> tuple[SessionKeys, bytes]:
    """Runs the server's side over a blocking socket; see `client_handshake`."""
    handshake, frames = ServerHandshake(credentials), _BlockingFrames(connection, deadline)
    while handshake.keys is None:
        try:
            frames.send(handshake.receive(frames.receive()))
        except HandshakeError as error:
            if error.reply:
                frames.send(error.reply)
            raise
    return handshake.keys, frames.rest()


class _BlockingFrames:
    """Sends and receives frames of a handshake before a deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = connection, deadline
        self._buffer = FrameBuffer(max_bytes=MAX_HANDSHAKE_BYTES)
        self.rest = self._buffer.take

    def send(self, body: bytes) -> None:
        self._set_timeout()
        self._socket.sendall(encode_frame(body))

    def receive(self) -> bytes:
        while (body := self._buffer.next()) is None:
            self._set_timeout()
            data = self._socket.recv(4096)
            if not data:
                raise ConnectionClosedError("the connection was closed")
            self._buffer.feed(data)
        return body

    def _set_timeout(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake timed out")
        self._socket.settimeout(left)
