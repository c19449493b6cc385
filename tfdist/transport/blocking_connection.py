"""Authenticated connection that blocks with time limits: requests, answers, and raw bytes for measurements."""

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from tfdist.transport.authenticated_messages import MAX_HANDSHAKE_BYTES, FrameBuffer, MessageCodec, encode_frame
from tfdist.transport.handshake import ClientHandshake, Credentials, ServerHandshake, SessionKeys
from tfdist.transport.transport_errors import ConnectionClosedError, FrameError, HandshakeError

_CHUNK_BYTES = 2**18
BlockingHandshake = Callable[[socket.socket, Credentials, float], tuple[SessionKeys, bytes]]


class BlockingConnection:
    """Sends and receives JSON objects after a handshake, for one thread at a time.

    `close` closes the socket. `received` are bytes that arrived behind the handshake. Methods raise a
    ConnectionClosedError if the other side is gone, does not read or answer in time, or is not authentic.
    """

    def __init__(self, connection: socket.socket, keys: SessionKeys, received: bytes = b"") -> None:
        self._socket = connection
        self._codec = MessageCodec(send_key=keys.send_key, receive_key=keys.receive_key, received=received)

    @classmethod
    def connect(cls, connection: socket.socket, credentials: Credentials, *, timeout_seconds: float) -> Self:
        """Runs the client's side of the handshake; closes the connection if the handshake fails.

        A TransportError: the other side is not trusted, does not trust this side, or does not answer in time.
        """
        return cls._open(client_handshake, connection, credentials, timeout_seconds)

    @classmethod
    def accept(cls, connection: socket.socket, credentials: Credentials, *, timeout_seconds: float) -> Self:
        """Runs the server's side of the handshake; see `connect`."""
        return cls._open(server_handshake, connection, credentials, timeout_seconds)

    @classmethod
    def _open(
        cls, handshake: BlockingHandshake, connection: socket.socket, credentials: Credentials, timeout_seconds: float
    ) -> Self:
        try:
            set_tcp_options(connection)
            with _as_closed():
                return cls(connection, *handshake(connection, credentials, time.monotonic() + timeout_seconds))
        except BaseException:
            connection.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the other side is still connected, as far as this side can see without a request."""
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN | select.POLLRDHUP)  # an end behind unread messages, too
            return all(events == select.POLLIN for _, events in poller.poll(0))
        except (OSError, ValueError):  # broken, or closed here
            return False

    def close(self) -> None:
        close_socket(self._socket)

    def detach(self) -> tuple[socket.socket, MessageCodec]:
        """Returns the socket, which the caller closes, and the codec of further messages."""
        return self._socket, self._codec

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """Sends file descriptors over a Unix socket, outside of messages."""
        with _as_closed():
            socket.send_fds(self._socket, [b"."], list(descriptors))

    def receive_descriptors(self, count: int, timeout_seconds: float) -> tuple[int, ...]:
        """Receives `count` file descriptors that the other side sent after it had received the last message."""
        with _as_closed():
            self._socket.settimeout(timeout_seconds)
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, count)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if len(descriptors) != count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConnectionClosedError("the other side closed the connection")
        return tuple(descriptors)

    def request(self, *, timeout_seconds: float, **message: object) -> dict[str, Any]:
        """Sends a message and returns the answer. A ConnectionClosedError: there is none, or it is an error."""
        self.send(message)
        answer = self.receive(timeout_seconds)
        if "error" in answer:
            raise ConnectionClosedError(str(answer["error"])[:500])
        return answer

    def send(self, message: dict[str, Any], timeout_seconds: float = 10.0) -> None:
        self._send(self._codec.encode(message), timeout_seconds)

    def receive(self, timeout_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        try:
            while (message := self._codec.next()) is None:
                self._codec.buffer.feed(self._receive(_CHUNK_BYTES, deadline))
        except FrameError as error:
            raise ConnectionClosedError(str(error)) from error
        return message

    def send_data(self, data: memoryview, timeout_seconds: float) -> None:
        """Sends bytes outside of messages; the time-out is that of each part of 256 kB."""
        for begin in range(0, len(data), _CHUNK_BYTES):
            self._send(data[begin : begin + _CHUNK_BYTES], timeout_seconds)

    def receive_data(self, into: memoryview, timeout_seconds: float) -> None:
        """Receives as many bytes as `into` has, outside of messages; the time-out is that of each part."""
        early = self._codec.buffer.take(len(into))
        into[: len(early)] = early
        begin = len(early)
        with _as_closed():
            self._socket.settimeout(timeout_seconds)
            while begin < len(into):
                count = self._socket.recv_into(into[begin:])
                if not count:
                    raise ConnectionClosedError("the other side closed the connection")
                begin += count

    def send_bytes(self, count: int, timeout_seconds: float) -> None:
        """Sends `count` bytes of any content, outside of messages."""
        deadline, block = time.monotonic() + timeout_seconds, memoryview(bytes(min(count, _CHUNK_BYTES)))
        while count > 0:
            self._send(block[: min(count, _CHUNK_BYTES)], deadline - time.monotonic())
            count -= min(count, _CHUNK_BYTES)

    def receive_bytes(self, count: int, timeout_seconds: float) -> float:
        """Receives `count` bytes and returns the rate of the second half, in bytes per second.

        The first half does not count: the connection has not reached its speed, and the buffers of the network take
        some bytes at once.
        """
        began = time.monotonic()
        received = len(self._codec.buffer.take(count))
        half_at, half = began, received
        is_second_half = False
        while received < count:
            received += len(self._receive(min(count - received, _CHUNK_BYTES), began + timeout_seconds))
            if not is_second_half and 2 * received >= count > received:
                is_second_half, half_at, half = True, time.monotonic(), received
        return max(count - half, 1) / max(time.monotonic() - half_at, 1e-9)

    def _send(self, data: bytes | memoryview, timeout_seconds: float) -> None:
        with _as_closed():
            self._socket.settimeout(max(timeout_seconds, 0.001))
            try:
                self._socket.sendall(data)
            except TimeoutError as error:
                raise ConnectionClosedError("the other side does not read its messages") from error

    def _receive(self, most: int, deadline: float) -> bytes:
        with _as_closed():
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._socket.recv(most)
        if not data:
            raise ConnectionClosedError("the other side closed the connection")
        return data


@contextlib.contextmanager
def _as_closed() -> Iterator[None]:
    """Turns errors of the socket into `ConnectionClosedError`."""
    try:
        yield
    except TimeoutError as error:
        raise ConnectionClosedError("no answer in time") from error
    except OSError as error:
        raise ConnectionClosedError(f"the connection broke ({error.strerror or error})") from error


def close_socket(connection: socket.socket) -> None:
    """Closes a socket, and wakes a thread that waits in it."""
    try:
        # SHUT_RDWR would start an orderly close, which may leave the port in TIME_WAIT.
        connection.shutdown(socket.SHUT_RD)
    except OSError:
        pass
    connection.close()


def set_tcp_options(connection: socket.socket) -> None:
    """Disables Nagle's algorithm, and enables keepalive, by which the kernel notices a lost host."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def client_handshake(connection: socket.socket, credentials: Credentials, deadline: float) -> tuple[SessionKeys, bytes]:
    """Runs the client's side over a blocking socket; returns the keys, and the bytes that arrived behind the handshake.

    A TransportError: the handshake fails. An OSError: the connection fails, or the deadline passes.
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
        seconds_left = self._deadline - time.monotonic()
        if seconds_left <= 0:
            raise TimeoutError("the handshake timed out")
        self._socket.settimeout(seconds_left)
