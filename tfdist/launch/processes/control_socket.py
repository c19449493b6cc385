"""A Unix socket at which a run listens for requests of its user."""

import collections
import contextlib
import json
import os
import select
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.launch.processes.event_loop import EventLoop
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.json_messages import json_object

_BACKLOG = 16
MAX_BYTES = 4096

Answer = Callable[[Mapping[str, Any]], Mapping[str, str]]


class ControlSocket:
    """Listens at a path, until `close`, which removes it. Only the same user, and root, may connect.

    Raises:
        UsageError: Another run listens there, or the socket cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: collections.deque[socket.socket] = collections.deque()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _remove_unused(path)
            mask = os.umask(0o177)
            try:
                self._server.bind(str(path))
            finally:
                os.umask(mask)
            self._server.listen(_BACKLOG)
            self._server.setblocking(False)
        except OSError as error:
            self._server.close()
            raise UsageError(
                f"The control socket cannot be created. Received: --control-socket {path} ({error.strerror or error}). "
                "Expected: a path of at most 107 bytes in a writable directory, at which no other run listens. Choose "
                "another one."
            ) from error

    def answer_by(self, answer: Answer, events: EventLoop) -> None:
        """Answers requests in an event loop until that is closed. Later ones wait for the next event loop."""
        for connection in self._waiting:
            connection.close()
        self._waiting.clear()
        events.watch(self._server.fileno(), lambda: self._accept(answer, events))

    def close(self) -> None:
        """Stops listening."""
        for connection in [*self._waiting, self._server]:
            connection.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, answer: Answer, events: EventLoop) -> None:
        with contextlib.suppress(OSError):
            connection = self._server.accept()[0]
            connection.setblocking(False)
            if len(self._waiting) == _BACKLOG:
                oldest = self._waiting.popleft()
                events.unwatch(oldest.fileno())
                oldest.close()
            self._waiting.append(connection)
            events.watch(connection.fileno(), lambda: self._answer_one(connection, answer, events))

    def _answer_one(self, connection: socket.socket, answer: Answer, events: EventLoop) -> None:
        events.unwatch(connection.fileno())
        self._waiting.remove(connection)
        with connection, contextlib.suppress(OSError, ValueError):  # whoever does not ask properly gets no answer
            message = json_object(connection.recv(MAX_BYTES))
            if not _has_hung_up(connection):  # who does not wait may have asked again
                connection.send(json.dumps(answer(message)).encode())


def _has_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def _remove_unused(path: Path) -> None:
    """Removes the socket of a run that has ended without removing it."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if is_socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.settimeout(1.0)
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
