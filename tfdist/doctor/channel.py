"""What two tasks say to each other: JSON objects, a line each, and raw bytes between them; all of limited size."""

import json
import select
import socket
import time
from typing import Any

from tfdist.cluster.json_object import json_object

MAX_GREETING_BYTES = 4096
MAX_MESSAGE_BYTES = 2**20
_CHUNK = 2**18


class ChannelError(OSError):
    """The other side is gone, too slow, or says what is no message."""


class Channel:
    """A connection to another task, for one thread at a time.

    Args:
        connection: A connected socket; closed with the channel.
        max_message_bytes: The longest line that is taken.

    >>> ours, theirs = map(Channel, socket.socketpair())
    >>> ours.send({"do": "echo"})
    >>> theirs.receive(limit_seconds=1)
    {'do': 'echo'}
    """

    def __init__(self, connection: socket.socket, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.max_message_bytes = max_message_bytes
        self._socket = connection
        self._received = bytearray()

    @property
    def is_open(self) -> bool:
        """Whether the other side is still there, as far as can be told without asking it."""
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            return not poller.poll(0) or bool(self._socket.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):  # broken, or closed here
            return False

    def close(self) -> None:
        """Closes the connection; wakes whoever waits in it."""
        try:
            # Not RDWR: it would begin an orderly end, which may leave the port in TIME_WAIT.
            self._socket.shutdown(socket.SHUT_RD)
        except OSError:
            pass
        self._socket.close()

    def ask(self, *, limit_seconds: float, **message: object) -> dict[str, Any]:
        """Sends a message and returns the answer.

        Raises:
            ChannelError: If there is none, or it says that the other side could not do it.
        """
        self.send(message)
        answer = self.receive(limit_seconds)
        if "error" in answer:
            raise ChannelError(str(answer["error"])[:500])
        return answer

    def send(self, message: dict[str, Any], limit_seconds: float = 10.0) -> None:
        """Sends a message.

        Raises:
            ChannelError: If the other side is gone or does not read.
        """
        self._send(json.dumps(message).encode() + b"\n", limit_seconds)

    def receive(self, limit_seconds: float) -> dict[str, Any]:
        """Returns the next message.

        Raises:
            ChannelError: If none arrives in time, or what arrives is none.
        """
        end = time.monotonic() + limit_seconds
        while (position := self._received.find(b"\n")) < 0:
            if len(self._received) > self.max_message_bytes:
                break
            self._received += self._take(_CHUNK, end)
        if not 0 <= position <= self.max_message_bytes:
            raise ChannelError("it says what is no message")
        line = bytes(self._received[:position])
        del self._received[: position + 1]
        try:
            return json_object(line)
        except ValueError as error:
            raise ChannelError("it says what is no message") from error

    def send_bytes(self, count: int, limit_seconds: float) -> None:
        """Sends `count` bytes of any content.

        Raises:
            ChannelError: If the other side is gone or does not read.
        """
        end, block = time.monotonic() + limit_seconds, memoryview(bytes(min(count, _CHUNK)))
        while count > 0:
            self._send(block[: min(count, _CHUNK)], end - time.monotonic())
            count -= min(count, _CHUNK)

    def receive_bytes(self, count: int, limit_seconds: float) -> float:
        """Takes `count` bytes and returns the bytes a second at which the second half of them arrived.

        The first half is not counted: the connection is getting up to its speed, and what the network's buffers take
        at once says nothing of what it carries.

        Raises:
            ChannelError: If they do not arrive in time.
        """
        began = time.monotonic()
        taken = min(count, len(self._received))
        del self._received[:taken]
        marks = [(taken, began)]
        while taken < count:
            taken += len(self._take(min(count - taken, _CHUNK), began + limit_seconds))
            if len(marks) == 1 and 2 * taken >= count > taken:
                marks.append((taken, time.monotonic()))
        at, since = marks[-1]
        return max(count - at, 1) / max(time.monotonic() - since, 1e-9)

    def _send(self, data: bytes | memoryview, limit_seconds: float) -> None:
        try:
            self._socket.settimeout(max(limit_seconds, 0.001))
            self._socket.sendall(data)
        except TimeoutError as error:
            raise ChannelError("it does not read what it is sent") from error
        except OSError as error:
            raise ChannelError(f"the connection broke ({error.strerror or error})") from error

    def _take(self, most: int, end: float) -> bytes:
        try:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            data = self._socket.recv(most)
        except TimeoutError as error:
            raise ChannelError("it does not answer in time") from error
        except OSError as error:
            raise ChannelError(f"the connection broke ({error.strerror or error})") from error
        if not data:
            raise ChannelError("it closed the connection")
        return data
