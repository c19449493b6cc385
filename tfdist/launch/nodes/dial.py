"""How a supervisor reaches the coordinator."""

import contextlib
import socket
import time
from collections.abc import Callable

from tfdist.launch.errors import UsageError
from tfdist.launch.nodes.door import WRONG_TOKEN
from tfdist.launch.nodes.frames import MAX_GREETING_BYTES, FrameBuffer, FrameError, framed
from tfdist.launch.nodes.handshake import Greeting, Secrets, encode_proof, is_proof, refusal
from tfdist.launch.nodes.link import Link, tune

_TRY_SECONDS = 10.0
_PAUSE_SECONDS = 0.25
_PATIENCE_SECONDS = 2.0  # before the user is told that nobody answers yet


def dial(host: str, port: int, token: str, *, timeout_seconds: float, say: Callable[[str], None]) -> Link:
    """Connects to the coordinator, which may not be up yet, and proves the token.

    Args:
        host: The host of the coordinator.
        port: Its port.
        token: What both have to know.
        timeout_seconds: How long to try.
        say: Tells the user why it takes long.

    Raises:
        UsageError: If nobody answers in time, or who answers has another token, protocol or version.
    """
    began = time.monotonic()
    end = began + timeout_seconds
    has_told = False
    while True:
        try:
            return _connect(host, port, token, until=min(end, time.monotonic() + _TRY_SECONDS))
        except (OSError, FrameError) as error:
            reason = str(getattr(error, "strerror", None) or error)
        now = time.monotonic()
        if now >= end:
            raise UsageError(
                f"The rendezvous did not answer. Received: {reason} at {host}:{port} for {timeout_seconds:g} s. "
                "Expected: tfdist run --node-rank 0 on that host, and no firewall before that port. Start node 0, "
                "correct --rendezvous, or give it longer by --start-timeout."
            )
        if not has_told and now >= began + _PATIENCE_SECONDS:
            has_told = True
            say(f"waiting for the rendezvous at {host}:{port} ({reason})")
        time.sleep(min(_PAUSE_SECONDS, end - now))


def _connect(host: str, port: int, token: str, *, until: float) -> Link:
    connection = socket.create_connection((host, port), timeout=max(until - time.monotonic(), 0.1))
    try:
        return _shake_hands(connection, f"{host}:{port}", token, until)
    except BaseException:
        connection.close()
        raise


def _shake_hands(connection: socket.socket, where: str, token: str, until: float) -> Link:
    tune(connection)
    reader = _Reader(connection, until)
    own = Greeting.new()
    connection.sendall(framed(own.encode()))
    theirs = Greeting.decode(reader.next())
    reason = own.why_not(theirs)
    if reason:
        raise UsageError(
            f"The hosts have different versions of tfdist. Received: {reason}, at {where}. Expected: the same "
            "everywhere. Install the same version on all hosts."
        )
    secrets = Secrets.derive(token, joiner=own, coordinator=theirs)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it has said before it closed says why
        connection.sendall(framed(encode_proof(secrets.joiner_proof)))
    answer = reader.next()
    refused = refusal(answer)
    if refused == WRONG_TOKEN:
        raise UsageError(
            f"The token is wrong. Received: a token that the rendezvous at {where} refuses. Expected: the one of node "
            "0. Give the same --token-file or TFDIST_TOKEN on every host."
        )
    if refused:
        raise FrameError(refused)
    if not is_proof(answer, secrets.coordinator_proof):
        raise UsageError(
            f"Whoever answers at {where} does not know the token. Received: a wrong proof of it. Expected: node 0 of "
            "this run. Correct --rendezvous; if that is node 0, somebody is in between."
        )
    return Link(connection, send_key=secrets.joiner_key, receive_key=secrets.coordinator_key, received=reader.rest)


class _Reader:
    """Reads messages of the handshake, all before one point in time."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._socket, self._until = connection, until
        self._buffer = FrameBuffer(max_bytes=MAX_GREETING_BYTES)

    @property
    def rest(self) -> bytes:
        """What has arrived behind the last message."""
        return self._buffer.rest

    def next(self) -> bytes:
        while (body := self._buffer.next()) is None:
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError("the handshake took too long")
            self._socket.settimeout(left)
            data = self._socket.recv(4096)
            if not data:
                raise FrameError("the connection was closed")
            self._buffer.feed(data)
        return body
