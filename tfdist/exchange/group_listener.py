"""Listens on the address of a worker, and hands over what connects to it to the groups to which the worker belongs.

Workers of one host find each other by a socket without a place in the file system, over which they pass descriptors of
shared memory.
"""

import collections
import contextlib
import dataclasses
import errno
import ipaddress
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import TransportError
from tfdist.utils.cores_and_ports import host_and_port, listen_on_all_interfaces, naming_port

TOKEN_VARIABLE = "TFDIST_TOKEN"
HANDSHAKE_SECONDS = 10.0
_TLS_VARIABLES = ("TFDIST_TLS_CERT", "TFDIST_TLS_KEY", "TFDIST_TLS_CA")
_PAUSE_SECONDS = 0.05
_MAX_PENDING = 256  # connections that have not proved the token yet
_MAX_PENDING_PER_ADDRESS = 64


@dataclasses.dataclass(frozen=True)
class Encryption:
    """TLS between workers: each proves its certificate to the other. All are paths of files in PEM."""

    certificate: str  # of this worker
    key: str
    authority: str  # the certificates that are trusted

    def wrap(self, connection: socket.socket, *, is_server: bool) -> socket.socket:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # addresses of workers change; the authority says who is a worker
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context.wrap_socket(connection, server_side=is_server)


def encryption_of(environ: Mapping[str, str]) -> Encryption | None:
    """Returns the certificates that the environment gives for TLS between workers; `None` without.

    Raises:
        ValueError: Some of the three variables are set and some are not, or a file is missing.
    """
    paths = [environ.get(name, "").strip() for name in _TLS_VARIABLES]
    if not any(paths):
        return None
    missing = [name for name, path in zip(_TLS_VARIABLES, paths, strict=True) if not os.path.isfile(path)]
    if missing:
        raise ValueError(
            f"TLS between workers needs three files. Received: {dict(zip(_TLS_VARIABLES, paths, strict=True))}, and no "
            f"file for {', '.join(missing)}. Expected: the paths of this worker's certificate, its private key, and "
            "the certificates of the authority, each in PEM. Set all three on every worker, or none."
        )
    return Encryption(*paths)


@dataclasses.dataclass(frozen=True)
class Request:
    """A connection that has proved the token, and what its first message asks for."""

    connection: BlockingConnection
    message: dict[str, Any]
    is_local: bool  # whether it came by the socket of this host


class GroupListener:
    """Accepts connections while it is open. Each is taken by the group that its first message names, in a thread.

    Args:
        address: `host:port` of this worker.
        credentials: What both sides prove.
        encryption: Encrypts connections between hosts, if given.
        shares_memory: Whether workers of this host may connect by its own socket.

    Attributes:
        host_identity: What workers of one running kernel have in common; "" if they do not share memory.
        local_name: The name of the socket of this host; "" without.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        encryption: Encryption | None = None,
        shares_memory: bool = True,
    ) -> None:
        self._address, self._credentials, self._encryption = address, credentials, encryption
        self.host_identity = _host_identity() if shares_memory and hasattr(socket, "send_fds") else ""
        self.local_name = f"tfdist-{secrets.token_hex(16)}" if self.host_identity else ""
        self._takers: dict[str, Callable[[Request], None]] = {}  # by the name of a group
        self._sockets: list[socket.socket] = []
        self._pending: collections.Counter[str] = collections.Counter()  # by address
        self._pending_lock = threading.Lock()
        self._is_closed = False

    def open(self) -> None:
        """Begins to listen; more calls have no effect.

        Raises:
            OSError: The port is in use.
        """
        if self._sockets:
            return
        self._sockets.append(_server(*host_and_port(self._address)))
        if self.local_name:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind(f"\0{self.local_name}")
            local.listen(_MAX_PENDING)
            self._sockets.append(local)
        for listening in self._sockets:
            threading.Thread(target=self._accept, args=(listening,), name="tfdist exchange", daemon=True).start()

    def add(self, group: str, take: Callable[[Request], None]) -> None:
        """Calls `take` with each connection to a group, which keeps or closes it.

        If it raises a `TransportError` or an `OSError`, the connection is closed, and the other side tries again.
        """
        self._takers[group] = take

    def remove(self, group: str) -> None:
        """Closes later connections to a group."""
        self._takers.pop(group, None)

    def close(self) -> None:
        """Ends the threads, and closes the sockets."""
        self._is_closed = True
        for listening in self._sockets:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            listening.close()

    def close_in_fork(self) -> None:
        """Closes the sockets in a forked child; they stay open in the parent."""
        for listening in self._sockets:
            if (descriptor := listening.detach()) >= 0:
                os.close(descriptor)

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, address = listening.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_PAUSE_SECONDS)  # no descriptor is free at the moment
                continue
            source = str(address[0]) if connection.family != socket.AF_UNIX else "this host"
            with self._pending_lock:
                is_one_too_many = self._pending[source] >= _MAX_PENDING_PER_ADDRESS
                is_one_too_many |= source != "this host" and self._pending.total() >= _MAX_PENDING
                self._pending[source] += not is_one_too_many
            if is_one_too_many or (source == "this host" and _user_of(connection) != os.getuid()):
                self._end_pending(source, not is_one_too_many)
                connection.close()
                continue
            arguments = (connection, source)
            threading.Thread(target=self._admit, args=arguments, name="tfdist exchange", daemon=True).start()

    def _end_pending(self, source: str, was_counted: bool = True) -> None:
        with self._pending_lock:
            self._pending[source] -= was_counted

    def _admit(self, connection: socket.socket, source: str) -> None:
        try:
            is_local = connection.family == socket.AF_UNIX
            connection.settimeout(HANDSHAKE_SECONDS)
            if self._encryption is not None and not is_local:
                connection = self._encryption.wrap(connection, is_server=True)
            accepted = BlockingConnection.accept(connection, self._credentials, timeout_seconds=HANDSHAKE_SECONDS)
            message = accepted.receive(HANDSHAKE_SECONDS)
            take = self._takers.get(str(message.get("group", "")))
            if take is None:
                accepted.close()
            else:
                take(Request(accepted, message, is_local))
        except (TransportError, OSError):
            connection.close()  # a stranger, or a worker that tries again
        except BaseException:
            connection.close()
            raise
        finally:
            self._end_pending(source)


def ask(
    connection: socket.socket,
    credentials: Credentials,
    message: dict[str, Any],
    *,
    encryption: Encryption | None = None,
) -> tuple[BlockingConnection, dict[str, Any]]:
    """Proves the token over a connection to a `GroupListener`, and sends a first message.

    Returns:
        The connection, and the answer.

    Raises:
        TransportError, OSError: There is none; the connection is closed.
    """
    try:
        if encryption is not None and connection.family != socket.AF_UNIX:
            connection = encryption.wrap(connection, is_server=False)
        opened = BlockingConnection.connect(connection, credentials, timeout_seconds=HANDSHAKE_SECONDS)
        opened.send(message)
        return opened, opened.receive(HANDSHAKE_SECONDS)
    except BaseException:
        connection.close()
        raise


def _server(host: str, port: int) -> socket.socket:
    """Listens on the address of this worker if it is numeric; on all interfaces if it is a name.

    On its own host a name may resolve to a loopback address, and a numeric address may be a translated one, which this
    host does not have.
    """
    with naming_port(port):
        if host == "localhost" or _is_address(host):
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            try:
                return socket.create_server(place, family=family, backlog=_MAX_PENDING)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        return listen_on_all_interfaces(port, backlog=_MAX_PENDING)


def _host_identity() -> str:
    """Returns what workers of one running kernel have in common."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _user_of(connection: socket.socket) -> int:
    """Returns the user whose process is at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)
