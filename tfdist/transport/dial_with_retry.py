"""Dials a server that may not be up yet."""

import socket
import time
from collections.abc import Callable

from tfdist.transport.blocking_handshake import client_handshake
from tfdist.transport.connection import Connection, set_tcp_options
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import (
    ConnectionClosedError,
    InvalidProofError,
    ProtocolMismatchError,
    TokenRejectedError,
    TransportError,
)

_TRY_SECONDS = 10.0
_PAUSE_SECONDS = 0.25
_QUIET_SECONDS = 2.0  # before the user is shown why it takes long


def dial(
    host: str, port: int, credentials: Credentials, *, timeout_seconds: float, on_wait: Callable[[str], None]
) -> Connection:
    """Connects to a server and runs the handshake, again and again until one try succeeds or the time is over.

    Args:
        host: Host of the server.
        port: Port of the server.
        credentials: Of this process.
        timeout_seconds: How long to try.
        on_wait: Called once with the reason if the server does not answer for two seconds.

    Raises:
        ConnectionClosedError: If no try succeeds in time; the text is the last reason.
        ProtocolMismatchError, TokenRejectedError, InvalidProofError: If another try cannot succeed.
    """
    began = time.monotonic()
    end = began + timeout_seconds
    has_reported = False
    while True:
        try:
            return _connect(host, port, credentials, deadline=min(end, time.monotonic() + _TRY_SECONDS))
        except (ProtocolMismatchError, TokenRejectedError, InvalidProofError):
            raise
        except (OSError, TransportError) as error:
            reason = str(getattr(error, "strerror", None) or error)
        now = time.monotonic()
        if now >= end:
            raise ConnectionClosedError(reason)
        if not has_reported and now >= began + _QUIET_SECONDS:
            has_reported = True
            on_wait(reason)
        time.sleep(min(_PAUSE_SECONDS, end - now))


def _connect(host: str, port: int, credentials: Credentials, *, deadline: float) -> Connection:
    connection = socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1))
    try:
        set_tcp_options(connection)
        keys, received = client_handshake(connection, credentials, deadline)
        return Connection(connection, keys, received)
    except BaseException:
        connection.close()
        raise
