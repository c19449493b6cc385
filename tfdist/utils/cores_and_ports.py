"""The CPU cores and TCP ports of this host, how the workers share them, and the addresses at which they listen."""

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfdist.utils.cgroup_limits import cpu_quotas
from tfdist.utils.formatting import counted

_INTER_OP = "TF_NUM_INTEROP_THREADS"
THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", _INTER_OP, "OMP_NUM_THREADS")
# TensorFlow's servers also answer other processes in these threads: with one, only when backpropagation has ended.
_MIN_INTER_OP_THREADS = 2
_FIRST_PORT, _TRIES = 12_000, 100


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores that this process may use: its affinity, limited by the CPU quota of its cgroups."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *map(int, cpu_quotas(root))]))


class ThreadShare:
    """The number of threads of each of some processes, which share usable cores.

    A number that the user has chosen takes precedence over the launcher's environment, whose variables stay otherwise.
    `who` are the processes, for messages; empty: workers.

    >>> share = ThreadShare(2, 4, None, {"OMP_NUM_THREADS": "1"})
    >>> share.environment()
    {'TF_NUM_INTRAOP_THREADS': '2', 'TF_NUM_INTEROP_THREADS': '2'}
    >>> ThreadShare(2, 2, None, {}).describe()
    '2 workers, 1 thread each (2 usable cores)'
    """

    def __init__(
        self, processes: int, cores: int, chosen: int | None, environ: Mapping[str, str], *, who: str = ""
    ) -> None:
        self._who, self._cores = who or counted(processes, "worker"), cores
        self._threads = max(1, cores // processes) if chosen is None else chosen
        self._kept = {} if chosen is not None else {name: environ[name] for name in THREAD_VARIABLES if name in environ}

    def environment(self) -> dict[str, str]:
        """Returns the variables to set in each process."""
        threads = {name: self._threads for name in THREAD_VARIABLES if name not in self._kept}
        least = {name: max(count, _MIN_INTER_OP_THREADS if name == _INTER_OP else 1) for name, count in threads.items()}
        return {name: str(count) for name, count in least.items()}

    def describe(self) -> str:
        share = f"{counted(self._threads, 'thread')} each"
        if self._kept:
            variables = ", ".join(f"{name}={value}" for name, value in self._kept.items())
            all_kept = len(self._kept) == len(THREAD_VARIABLES)
            share = f"{variables} from the environment" + ("" if all_kept else f", otherwise {share}")
        return f"{self._who}, {share} ({counted(self._cores, 'usable core')})"


def temporary_ports(root: Path = Path("/")) -> tuple[int, int]:
    """Returns the first and the last of the ports that Linux gives to any program; `(1, 0)` if that is unknown."""
    with contextlib.suppress(OSError, ValueError):
        first, last = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    return 1, 0


def _bind(holder: socket.socket) -> None:
    """Binds a socket to a port that is not temporary, if one of some is free."""
    choices = max(temporary_ports()[0] - _FIRST_PORT, 0)
    for _ in range(_TRIES if choices else 0):
        try:
            return holder.bind(("", _FIRST_PORT + secrets.randbelow(choices)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    holder.bind(("", 0))


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the parts of a `host:port`.

    >>> host_and_port("node0:2222"), host_and_port("[::1]:2222")
    (('node0', 2222), ('::1', 2222))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Returns whether a host is known to be this one by its name or address.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("node7")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_on_all_interfaces(port: int, *, backlog: int | None = None) -> socket.socket:
    """Returns a socket that listens where TensorFlow's server does: on all interfaces, IPv6 and IPv4."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=has_both)


@contextlib.contextmanager
def naming_port(port: int) -> Iterator[None]:
    """Explains the error of the body if another process listens on `port`, the port of this task."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            errno.EADDRINUSE,
            f"The port of this task is in use. Received: port {port}, on which another process listens. Expected: a "
            "free port. End the other process, which may be left from an earlier run, or choose another port: in "
            "TF_CONFIG; under Slurm and Kubernetes by TFDIST_PORT, the same for all tasks.",
        ) from error


class ReservedPorts:
    """Free TCP ports, held by bound sockets until the `with` block ends.

    TensorFlow's server rejects a port that any process still holds, even with SO_REUSEPORT, so the ports are released
    just before the workers start. On the host's network another process may take one in between; the worker then fails
    with an error that says so. So the ports are none of those that Linux gives to connections of any program. They are
    free on all interfaces because TensorFlow's server listens on all.

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
                _bind(holder)
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

    def __exit__(self, *_: object) -> None:
        self.release()
