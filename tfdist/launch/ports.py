"""Ports that are free at the moment the workers start."""

import socket
from types import TracebackType


class ReservedPorts:
    """Free TCP ports, held by bound sockets until the `with` block ends.

    TensorFlow's server refuses a port that anyone still holds, even with SO_REUSEPORT, so the ports are released just
    before the workers start. On the host's network another process may take one in between; the worker then fails and
    says so. They are reserved on all interfaces because that is where TensorFlow's server listens.

    Args:
        count: Number of ports.

    >>> with ReservedPorts(2) as reserved:
    ...     len(set(reserved.ports))
    2
    """

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                self._sockets.append(holder)
                holder.bind(("", 0))
        except OSError:
            self.release()
            raise
        self.ports: tuple[int, ...] = tuple(holder.getsockname()[1] for holder in self._sockets)

    def release(self) -> None:
        """Frees the ports. They stay listed in `ports`."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> "ReservedPorts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
