"""Authenticated connection that blocks with time limits: requests, answers, and raw bytes for measurements."""

import select
import socket
import time
from typing import Any

from tfdist.transport.authenticated_messages import MessageCodec
from tfdist.transport.blocking_handshake import BlockingHandshake, client_handshake, server_handshake
from tfdist.transport.connection import set_tcp_options
from tfdist.transport.handshake import Credentials, SessionKeys
from tfdist.transport.transport_errors import ConnectionClosedError, FrameError

_CHUNK_BYTES = 2**18


class Channel:
    """Sends and receives JSON objects after a handshake, for one thread at a time.

    Args:
        connection: A connected socket. `close` closes it.
        keys: This side's keys.
        received: Bytes that arrived behind the handshake.

    >>> ends = socket.socketpair()
    >>> ours = Channel(ends[0], SessionKeys(b"client", b"server"))
    >>> theirs = Channel(ends[1], SessionKeys(b"server", b"client"))
    >>> ours.send({"do": "echo"})
    >>> theirs.receive(timeout_seconds=1)
    {'do': 'echo'}
    >>> ours.close()
    >>> theirs.close()
    """

    def __init__(self, connection: socket.socket, keys: SessionKeys, received: bytes = b"") -> None:
        self._socket = connection
        self._codec = MessageCodec(send_key=keys.send_key, receive_key=keys.receive_key, received=received)

    @classmethod
    def connect(cls, connection: socket.socket, credentials: Credentials, *, timeout_seconds: float) -> "Channel":
        """Runs the client's side of the handshake; closes the connection if the handshake fails.

        Raises:
            TransportError: If the other side is not trusted, does not trust this side, or does not answer in time.
        """
        return cls._open(client_handshake, connection, credentials, timeout_seconds)

    @classmethod
    def accept(cls, connection: socket.socket, credentials: Credentials, *, timeout_seconds: float) -> "Channel":
        """Runs the server's side of the handshake; see `connect`."""
        return cls._open(server_handshake, connection, credentials, timeout_seconds)

    @classmethod
    def _open(
        cls, handshake: BlockingHandshake, connection: socket.socket, credentials: Credentials, timeout_seconds: float
    ) -> "Channel":
        try:
            set_tcp_options(connection)
            return cls(connection, *handshake(connection, credentials, time.monotonic() + timeout_seconds))
        except TimeoutError as error:
            connection.close()
            raise ConnectionClosedError("no answer in time") from error
        except OSError as error:
            connection.close()
            raise ConnectionClosedError(f"the connection broke ({error.strerror or error})") from error
        except BaseException:
            connection.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the other side is still connected, as far as this side can see without a request."""
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            return not poller.poll(0) or bool(self._socket.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # broken, or closed here
            return False

    def close(self) -> None:
        """Closes the connection; see `close_socket`."""
        close_socket(self._socket)

    def request(self, *, timeout_seconds: float, **message: object) -> dict[str, Any]:
        """Sends a message and returns the answer.

        Raises:
            ConnectionClosedError: If there is no answer, or if the answer is an error.
        """
        self.send(message)
        answer = self.receive(timeout_seconds)
        if "error" in answer:
            raise ConnectionClosedError(str(answer["error"])[:500])
        return answer

    def send(self, message: dict[str, Any], timeout_seconds: float = 10.0) -> None:
        """Sends a message.

        Raises:
            ConnectionClosedError: If the other side is gone or does not read.
        """
        self._send(self._codec.encode(message), timeout_seconds)

    def receive(self, timeout_seconds: float) -> dict[str, Any]:
        """Returns the next message.

        Raises:
            ConnectionClosedError: If none arrives in time, or the received bytes are not an authentic message.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            while (message := self._codec.next()) is None:
                self._codec.buffer.feed(self._receive(_CHUNK_BYTES, deadline))
        except FrameError as error:
            raise ConnectionClosedError(str(error)) from error
        return message

    def send_bytes(self, count: int, timeout_seconds: float) -> None:
        """Sends `count` bytes of any content, outside of messages.

        Raises:
            ConnectionClosedError: If the other side is gone or does not read.
        """
        deadline, block = time.monotonic() + timeout_seconds, memoryview(bytes(min(count, _CHUNK_BYTES)))
        while count > 0:
            self._send(block[: min(count, _CHUNK_BYTES)], deadline - time.monotonic())
            count -= min(count, _CHUNK_BYTES)

    def receive_bytes(self, count: int, timeout_seconds: float) -> float:
        """Receives `count` bytes and returns the rate of the second half, in bytes per second.

        The first half does not count: the connection has not reached its speed, and the buffers of the network take
        some bytes at once.

        Raises:
            ConnectionClosedError: If the bytes do not arrive in time.
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
        try:
            self._socket.settimeout(max(timeout_seconds, 0.001))
            self._socket.sendall(data)
        except TimeoutError as error:
            raise ConnectionClosedError("the other side does not read its messages") from error
        except OSError as error:
            raise ConnectionClosedError(f"the connection broke ({error.strerror or error})") from error

    def _receive(self, most: int, deadline: float) -> bytes:
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._socket.recv(most)
        except TimeoutError as error:
            raise ConnectionClosedError("no answer in time") from error
        except OSError as error:
            raise ConnectionClosedError(f"the connection broke ({error.strerror or error})") from error
        if not data:
            raise ConnectionClosedError("the other side closed the connection")
        return data


def close_socket(connection: socket.socket) -> None:
    """Closes a socket, and wakes a thread that waits in it."""
    try:
        # SHUT_RDWR would start an orderly close, which may leave the port in TIME_WAIT.
        connection.shutdown(socket.SHUT_RD)
    except OSError:
        pass
    connection.close()
