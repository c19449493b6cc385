"""Waits for the other tasks of a cluster before TensorFlow does, which would wait for ever and hear no signal."""

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping

_PROBE_SECONDS = 1.0
_PAUSE_SECONDS = 0.05
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # no TIME_WAIT, which would keep the port from TensorFlow's server


def wait_for_peers(own_address: str, peers: Mapping[str, str], timeout_seconds: float) -> None:
    """Returns when every peer's address accepts connections; own_address does so meanwhile.

    Whoever waits listens on its own port, so that all tasks see each other however they start; afterwards the port is
    free for TensorFlow's server. A peer that has gone on already answers by its server.

    Args:
      own_address: `host:port` of this task. The port is listened on at all interfaces, as TensorFlow's server will.
      peers: task name (`worker 1`) to `host:port` of the others.
      timeout_seconds: how long to wait.

    Raises:
      TimeoutError: a peer did not answer in time; the message names all that did not.
      OSError: this task's own port cannot be listened on.

    >>> wait_for_peers("localhost:0", {}, timeout_seconds=1)
    """
    if not peers:
        return
    port = int(own_address.rpartition(":")[2])
    with _listening(port):
        missing = dict(peers)
        reasons: dict[str, str] = {}
        end = time.monotonic() + timeout_seconds
        while missing:
            for task, address in list(missing.items()):
                reason = why_unreachable(address, min(_PROBE_SECONDS, timeout_seconds))
                if reason is None:
                    del missing[task]
                else:
                    reasons[task] = reason
            if missing and time.monotonic() > end:
                found = "; ".join(f"{task} at {address} ({reasons[task]})" for task, address in missing.items())
                raise TimeoutError(
                    f"The cluster was not complete after {timeout_seconds:g} s. Received: no answer from {found}. "
                    "Expected: every task of the cluster to make its strategy in that time. Look at the missing "
                    "tasks' logs, or give them longer by `tfdist run --start-timeout` or "
                    "`MultiWorkerMirroredStrategy(start_timeout=...)`."
                )
            if missing:
                time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def _listening(port: int) -> Iterator[None]:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            errno.EADDRINUSE,
            f"This task's own port is taken. Received: port {port}, on which another process listens. Expected: the "
            "port of this task in TF_CONFIG to be free. End the other process (one left from an earlier run?), or "
            "choose another port for all tasks.",
        ) from error

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            connection.close()

    acceptor = threading.Thread(target=accept, name="tfdist-rendezvous", daemon=True)
    acceptor.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        server.close()
        acceptor.join()


def why_unreachable(address: str, timeout_seconds: float) -> str | None:
    """Why nothing at `address`, a `host:port`, takes connections; `None` if something does."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds)
    except OSError as error:
        return str(error.strerror or error)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    connection.close()
    return None
