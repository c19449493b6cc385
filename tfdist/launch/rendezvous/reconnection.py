"""Connects with the coordinator again while the workers of this host train on, without waiting for it."""

import os
import select
import socket
import subprocess
import sys
import time

from tfdist.transport.blocking_connection import client_handshake, set_tcp_options
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import TransportError

_PAUSE_SECONDS = 1.0
_LOOK_UP_SECONDS = 20.0  # two name servers that do not answer are asked twice, for 5 s each
_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 2.0  # a coordinator answers at once: it does nothing else
_REFUSAL_SECONDS = 10.0  # something else listens there, for which the workers of this host would have to wait each time
_LOOK_UP = "import socket, sys; print(socket.getaddrinfo(sys.argv[1], None, type=socket.SOCK_STREAM)[0][4][0])"


class Reconnection:
    """Tries to connect with an address again and again.

    Args:
        host: The host, whose name is looked up for each try: it may have another address when it returns.
        port: Its port.
        credentials: What both sides of the connection prove.
    """

    def __init__(self, host: str, port: int, credentials: Credentials) -> None:
        self._address, self._credentials = (host, port), credentials
        self._lookup: _NameLookup | None = None
        self._socket: socket.socket | None = None
        self._next_at = self._try_until = 0.0

    def advance(self) -> NonblockingConnection | None:
        """Begins or continues a try; returns the connection if it has succeeded. Call this repeatedly."""
        try:
            if self._socket is not None:
                return self._finish(self._socket)
            if self._lookup is not None:
                self._follow(self._lookup)
            elif time.monotonic() >= self._next_at:
                self._begin()
        except (OSError, TransportError):
            self.close()
        return None

    def close(self) -> None:
        """Ends a try that has begun."""
        for opened in (self._lookup, self._socket):
            if opened is not None:
                opened.close()
        self._lookup = None
        self._socket, self._next_at = None, time.monotonic() + _PAUSE_SECONDS

    def _begin(self) -> None:
        host = self._address[0]
        try:
            self._connect(host)
        except socket.gaierror:  # it is a name
            self._lookup, self._try_until = _NameLookup(host), time.monotonic() + _LOOK_UP_SECONDS

    def _follow(self, lookup: "_NameLookup") -> None:
        address = lookup.address()
        if address is not None:
            lookup.close()
            self._lookup = None
            self._connect(address)
        elif time.monotonic() >= self._try_until:
            raise TimeoutError

    def _connect(self, host: str) -> None:
        """Begins to connect with a numeric address. Raises `gaierror` for a name."""
        found = socket.getaddrinfo(host, self._address[1], type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, kind, protocol, _, address = found[0]
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
        try:
            keys, received = client_handshake(opened, self._credentials, time.monotonic() + _HANDSHAKE_SECONDS)
        except (OSError, TransportError):
            self.close()
            self._next_at = time.monotonic() + _REFUSAL_SECONDS
            return None
        self._socket, self._next_at = None, time.monotonic() + _PAUSE_SECONDS
        return NonblockingConnection(opened, keys, received)


class _NameLookup:
    """Looks up the address of a host in another process.

    Name servers that do not answer would block the supervisor, which starts workers and may not have a second thread.
    """

    def __init__(self, host: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", _LOOK_UP, host]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, bufsize=0)

    def address(self) -> str | None:
        """Returns the address, or `None` if there is none yet. Raises an OSError if there is none for the name."""
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(0):
            return None
        address = os.read(self._process.stdout.fileno(), 1024).decode().strip()
        if not address:
            raise socket.gaierror(socket.EAI_NONAME, "")
        return address

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()
