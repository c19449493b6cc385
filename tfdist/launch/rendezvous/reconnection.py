"""Connects with the coordinator again while the workers of this host train on, without waiting for it."""

import select
import socket
import time

from tfdist.transport.blocking_connection import client_handshake, set_tcp_options
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import TransportError

_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 2.0  # a coordinator answers at once: it does nothing else


class Reconnection:
    """Tries to connect with an address again and again.

    Args:
        host: The host, whose name is looked up for each try: it may have another address when it returns.
        port: Its port.
        credentials: What both sides of the connection prove.
    """

    def __init__(self, host: str, port: int, credentials: Credentials) -> None:
        self._address, self._credentials = (host, port), credentials
        self._socket: socket.socket | None = None
        self._next_at = self._try_until = 0.0

    def advance(self) -> NonblockingConnection | None:
        """Begins or continues a try; returns the connection if it has succeeded. Call this repeatedly."""
        try:
            if self._socket is not None:
                return self._finish(self._socket)
            if time.monotonic() >= self._next_at:
                self._begin()
        except (OSError, TransportError):
            self.close()
        return None

    def close(self) -> None:
        """Ends a try that has begun."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._next_at = None, time.monotonic() + _PAUSE_SECONDS

    def _begin(self) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        self._socket, self._try_until = socket.socket(family, kind, protocol), time.monotonic() + _CONNECT_SECONDS
        self._socket.setblocking(False)
        self._socket.connect_ex(address)

    def _finish(self, opened: socket.socket) -> NonblockingConnection | None:
        poll = select.poll()
        poll.register(opened, select.POLLOUT)
        if not poll.poll(0):
            if time.monotonic() >= self._try_until:
                raise TimeoutError
            return None
        if number := opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, "")
        set_tcp_options(opened)
        opened.setblocking(True)
        keys, received = client_handshake(opened, self._credentials, time.monotonic() + _HANDSHAKE_SECONDS)
        self._socket, self._next_at = None, time.monotonic() + _PAUSE_SECONDS
        return NonblockingConnection(opened, keys, received)
