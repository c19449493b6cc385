"""Waits for the other tasks of a cluster, with a limit. TensorFlow would wait forever and ignore signals."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping

from tfdist.utils.argument_checks import check_seconds
from tfdist.utils.cores_and_ports import host_and_port, listen_on_all_interfaces, naming_port

_PROBE_SECONDS = 1.0
_PAUSE_SECONDS = 0.05
_NAME_SECONDS = 10.0  # a name server may fail for a moment


def wait_for_peers(
    own_address: str, peers: Mapping[str, str], timeout_seconds: float, *, names_are_fixed: bool = False
) -> None:
    """Waits until the address of every peer accepts connections.

    Meanwhile this task accepts connections on its port, so that the order in which tasks start does not matter.
    Afterwards the port is free for TensorFlow's server. A peer that has finished waiting answers with its server.

    Args:
        own_address: `host:port` of this task. The port is opened on all interfaces, as TensorFlow's server does.
        peers: `host:port` of all other tasks, by task name (`worker 1`).
        timeout_seconds: How long to wait.
        names_are_fixed: Whether a name that does not resolve now never will: those of Slurm's nodes, not of pods.

    Raises:
        TimeoutError: If peers did not answer in time. The message names them.
        OSError: If the port of this task cannot be opened, or a name that is fixed does not resolve.
        ValueError: If `timeout_seconds` is not a finite number of at least 0.

    >>> wait_for_peers("localhost:0", {}, timeout_seconds=1)
    """
    check_seconds("timeout_seconds", timeout_seconds)
    if not peers:
        return
    with _listening(host_and_port(own_address)[1]):
        missing = dict(peers)
        reasons: dict[str, str] = {}
        began = time.monotonic()
        deadline = began + timeout_seconds
        while missing:
            for task, address in list(missing.items()):
                reason = why_unreachable(address, min(_PROBE_SECONDS, timeout_seconds))
                if reason is None:
                    del missing[task]
                else:
                    reasons[task] = reason
            if names_are_fixed and time.monotonic() > began + _NAME_SECONDS:
                check_names(missing)
            if missing and time.monotonic() > deadline:
                missing_tasks = "; ".join(f"{task} at {address} ({reasons[task]})" for task, address in missing.items())
                raise TimeoutError(
                    f"The cluster was not complete after {timeout_seconds:g} s. Received: no answer from "
                    f"{missing_tasks}. Expected: every task of the cluster to create its strategy in that time. Check "
                    "the logs of the missing tasks, or allow more time with `tfdist run --start-timeout` or "
                    "`MultiWorkerMirroredStrategy(start_timeout_seconds=...)`."
                )
            if missing:
                time.sleep(_PAUSE_SECONDS)


def check_names(missing: Mapping[str, str]) -> None:
    """Raises an OSError if names of `missing`, from task to `host:port`, do not resolve."""
    unknown: list[str] = []
    for task, address in missing.items():
        try:
            socket.getaddrinfo(*host_and_port(address))
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME:
                unknown.append(f"{task} at {address}")
    if unknown:
        raise OSError(
            f"The names of nodes do not resolve on {socket.gethostname()}. Received: {'; '.join(unknown)}. Expected: "
            "names that every node can resolve. Add them to DNS or to /etc/hosts of every node, or describe the "
            "cluster in TF_CONFIG by the addresses that `scontrol show node` shows as NodeAddr."
        )


@contextlib.contextmanager
def _listening(port: int) -> Iterator[None]:
    with naming_port(port):
        server = listen_on_all_interfaces(port)

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed
            reset_on_close(connection)
            connection.close()

    acceptor = threading.Thread(target=accept, name="tfdist-accept", daemon=True)
    acceptor.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        server.close()
        acceptor.join()


def why_unreachable(address: str, timeout_seconds: float) -> str | None:
    """Returns why `address`, a `host:port`, does not accept connections, or None if it does."""
    try:
        connection = socket.create_connection(host_and_port(address), timeout=timeout_seconds)
    except OSError as error:
        return str(error.strerror or error)
    reset_on_close(connection)
    connection.close()
    return None


def reset_on_close(connection: socket.socket) -> None:
    """Avoids TIME_WAIT, which would keep the port from TensorFlow's server. The other side sees a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
