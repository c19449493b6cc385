"""Accepts connections, and limits what a peer gets before it has proved the token."""

import collections
import contextlib
import errno
import socket
from collections.abc import Callable

from tfdist.transport.authenticated_messages import MAX_HANDSHAKE_BYTES, FrameBuffer, encode_frame
from tfdist.transport.blocking_connection import set_tcp_options
from tfdist.transport.handshake import Credentials, ServerHandshake
from tfdist.transport.nonblocking_connection import NonblockingConnection, plain_address
from tfdist.transport.transport_errors import FrameError, HandshakeError, TransportError

HANDSHAKE_SECONDS = 10.0
MAX_PENDING = 64
MAX_PENDING_PER_ADDRESS = 16
_MAX_REPORTS = 100


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
        """The descriptors to poll for input."""
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
        """Closes the listening socket and the connections that have not proved the token."""
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
        """Reads what has arrived; returns the connection once it has proved the token.

        Raises:
            TransportError: If the connection must be refused.
            OSError: If it is broken.
        """
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
