"""Authenticated connections that never block: dials a server that may not be up yet; accepts clients.

A client gets little before it has proved the token.
"""

import collections
import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.transport.authenticated_messages import (
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    FrameBuffer,
    MessageCodec,
    encode_frame,
)
from tfdist.transport.blocking_connection import BlockingConnection, client_handshake, set_tcp_options
from tfdist.transport.handshake import Credentials, ServerHandshake, SessionKeys
from tfdist.transport.transport_errors import (
    ConnectionClosedError,
    FrameError,
    HandshakeError,
    InvalidProofError,
    ProtocolMismatchError,
    TokenRejectedError,
    TransportError,
)

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_TRY_SECONDS = 10.0
_PAUSE_SECONDS = 0.25
_QUIET_SECONDS = 2.0  # before the user is shown why it takes long
_MAX_UNSENT_BYTES = 4 * MAX_MESSAGE_BYTES
HANDSHAKE_SECONDS = 10.0
MAX_PENDING = 64
MAX_PENDING_PER_ADDRESS = 16
_MAX_REPORTS = 100


class NonblockingConnection:
    """Sends and receives JSON objects after a handshake; see `MessageCodec`.

    `close` closes the socket. `received` are bytes that arrived behind the handshake. Methods raise a
    ConnectionClosedError if the other side is gone, does not read, or is not authentic.
    """

    def __init__(self, connection: socket.socket, keys: SessionKeys, received: bytes = b"") -> None:
        connection.setblocking(False)
        self._socket = connection
        self._codec = MessageCodec(send_key=keys.send_key, receive_key=keys.receive_key, received=received)
        self._unsent = bytearray()
        self._using_socket = threading.Lock()  # OpenSSL breaks a connection that two threads read and write at once

    @classmethod
    def continuing(cls, connection: BlockingConnection) -> "NonblockingConnection":
        """Returns a connection in place of one that blocks, after the messages of that one."""
        opened, codec = connection.detach()
        nonblocking = cls(opened, SessionKeys(b"", b""))
        nonblocking._codec = codec
        return nonblocking

    def fileno(self) -> int:
        """Returns the descriptor to poll, -1 after `close`."""
        return self._socket.fileno()

    @property
    def local_address(self) -> str:
        return plain_address(self._socket.getsockname()[0])

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, or buffers it until the socket accepts it."""
        self._unsent += self._codec.encode(message)
        self.flush()
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise ConnectionClosedError("the other side does not read its messages")

    def flush(self) -> None:
        """Sends as much as the socket accepts."""
        while self._unsent:
            try:
                with self._using_socket:
                    del self._unsent[: self._socket.send(self._unsent)]
            except WOULD_BLOCK:
                return
            except OSError as error:
                raise ConnectionClosedError(error.strerror or str(error)) from error

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yields the messages that have arrived; then raises an error if the other side has closed the connection."""
        reason = ""
        while not reason:
            try:
                with self._using_socket:
                    data = self._socket.recv(65_536)
            except WOULD_BLOCK:
                break
            except OSError as error:
                reason = error.strerror or str(error)
                break
            self._codec.buffer.feed(data)
            if not data:
                reason = "the connection was closed"
            yield from self._messages()
        yield from self._messages()
        if reason:
            raise ConnectionClosedError(reason)

    def close(self) -> None:
        """Closes the connection. Unsent messages are lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close_in_fork(self) -> None:
        """Closes the connection in a forked child; it stays open in the parent."""
        if (descriptor := self._socket.detach()) >= 0:  # not closed before the fork
            os.close(descriptor)

    def _messages(self) -> Iterator[dict[str, Any]]:
        try:
            while (message := self._codec.next()) is not None:
                yield message
        except FrameError as error:
            raise ConnectionClosedError(str(error)) from error


def dial(
    host: str, port: int, credentials: Credentials, *, timeout_seconds: float, on_wait: Callable[[str], None]
) -> NonblockingConnection:
    """Connects to a server and runs the handshake, again and again until one try succeeds or the time is over.

    `on_wait` is called once with the reason if the server does not answer for two seconds. A ConnectionClosedError: no
    try succeeds in time; the text is the last reason. Errors after which another try cannot succeed are raised at once.
    """
    began = time.monotonic()
    deadline = began + timeout_seconds
    has_reported = False
    while True:
        try:
            return _connect(host, port, credentials, deadline=min(deadline, time.monotonic() + _TRY_SECONDS))
        except (ProtocolMismatchError, TokenRejectedError, InvalidProofError):
            raise
        except (OSError, TransportError) as error:
            reason = str(getattr(error, "strerror", None) or error)
        now = time.monotonic()
        if now >= deadline:
            raise ConnectionClosedError(reason)
        if not has_reported and now >= began + _QUIET_SECONDS:
            has_reported = True
            on_wait(reason)
        time.sleep(min(_PAUSE_SECONDS, deadline - now))


def _connect(host: str, port: int, credentials: Credentials, *, deadline: float) -> NonblockingConnection:
    connection = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1))
    try:
        set_tcp_options(connection)
        keys, received = client_handshake(connection, credentials, deadline)
        return NonblockingConnection(connection, keys, received)
    except BaseException:
        connection.close()
        raise


def plain_address(address: str) -> str:
    """Returns an IPv4-mapped IPv6 address as IPv4, and any other address unchanged.

    >>> plain_address("::ffff:10.0.0.1"), plain_address("fe80::1")
    ('10.0.0.1', 'fe80::1')
    """
    return address.removeprefix("::ffff:") if "." in address else address


class Listener:
    """Accepts connections, runs their handshakes, and returns those that prove the token in time. Never blocks.

    `close` closes the listening socket. `say` shows the user a line about each refused connection, once per address and
    reason.
    """

    def __init__(self, server: socket.socket, credentials: Credentials, say: Callable[[str], None]) -> None:
        server.setblocking(False)
        self._server, self._credentials, self._say = server, credentials, say
        self._pending: dict[int, _PendingConnection] = {}
        self._reported: set[tuple[str, str]] = set()

    @property
    def descriptors(self) -> list[int]:
        return [self._server.fileno(), *self._pending]

    def accept(self, *, now: float) -> list[NonblockingConnection]:
        """Accepts, advances handshakes, drops late ones, and returns the connections that have proved the token."""
        self._accept_pending(now)
        connections = []
        for fd, pending in list(self._pending.items()):
            try:
                connection = pending.advance()
                if connection is None and now < pending.deadline:
                    continue
                if connection is None:
                    raise HandshakeError("no proof of the token in time")
                connections.append(connection)
            except (TransportError, OSError) as error:
                self._refuse(pending, str(error))
            del self._pending[fd]
        return connections

    def close(self) -> None:
        for pending in self._pending.values():
            pending.socket.close()
        self._pending.clear()
        self._server.close()

    def _accept_pending(self, now: float) -> None:
        for _ in range(MAX_PENDING):
            try:
                connection, address = self._server.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    self._report("any host", f"no resources ({error.strerror})")
                return
            host = plain_address(address[0])
            counts = collections.Counter(pending.host for pending in self._pending.values())
            if counts.total() >= MAX_PENDING or counts[host] >= MAX_PENDING_PER_ADDRESS:
                connection.close()
                self._report(host, "too many connections without a proof of the token")
                continue
            set_tcp_options(connection)
            connection.setblocking(False)
            handshake = ServerHandshake(self._credentials)
            self._pending[connection.fileno()] = _PendingConnection(
                connection, host, handshake, now + HANDSHAKE_SECONDS
            )

    def _refuse(self, pending: "_PendingConnection", reason: str) -> None:
        with contextlib.suppress(OSError):
            pending.socket.shutdown(socket.SHUT_WR)
        pending.socket.close()
        self._report(pending.host, reason)

    def _report(self, host: str, reason: str) -> None:
        if (host, reason) not in self._reported and len(self._reported) < _MAX_REPORTS:
            self._reported.add((host, reason))
            self._say(f"refused a connection from {host}: {reason}")


class _PendingConnection:
    """A connection that has not proved the token yet."""

    def __init__(self, connection: socket.socket, host: str, handshake: ServerHandshake, deadline: float) -> None:
        self.socket, self.host, self.deadline = connection, host, deadline
        self._handshake = handshake
        self._buffer = FrameBuffer(max_bytes=MAX_HANDSHAKE_BYTES)

    def advance(self) -> NonblockingConnection | None:
        """Reads what has arrived; returns the connection once it has proved the token. An error: refuse it."""
        try:
            data = self.socket.recv(2 * MAX_HANDSHAKE_BYTES)
        except BlockingIOError:
            return None
        self._buffer.feed(data)
        while (body := self._buffer.next()) is not None:
            try:
                self._send(self._handshake.receive(body))
            except HandshakeError as error:
                if error.reply:
                    self._send(error.reply)
                raise
            if self._handshake.keys is not None:
                if self._buffer.take():  # the client must wait for the answer
                    raise FrameError("unexpected data behind the handshake")
                return NonblockingConnection(self.socket, self._handshake.keys)
        if not data:
            raise HandshakeError("it closed the connection before it proved the token")
        return None

    def _send(self, body: bytes) -> None:
        # A new connection takes so few bytes at once, or is not worth keeping.
        frame = encode_frame(body)
        if self.socket.send(frame) != len(frame):
            raise HandshakeError("it does not read its messages")
