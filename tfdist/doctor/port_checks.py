"""Listens on this task's port, and finds out which process has it if that fails."""

import contextlib
import os
import socket
from pathlib import Path

from tfdist.cluster.wait_for_peers import listen_on_all_interfaces
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.report import ERROR, OK, WARNING, Finding
from tfdist.utils.cores_and_ports import temporary_ports
from tfdist.utils.formatting import printable

_LISTEN_STATE = "0A"
_LOOPBACK = ("127.0.0.1", "localhost")


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens where TensorFlow's server will: on all interfaces, or on loopback for such a host.

    Raises:
        OSError: If the port is not available.
    """
    if host in _LOOPBACK:
        return socket.create_server(("127.0.0.1", port))
    return listen_on_all_interfaces(port)


def free_port(context: CheckContext, host: str, port: int) -> Finding:
    """Returns the finding for a port that is available."""
    first, last = temporary_ports(context.root)
    is_temporary = host in _LOOPBACK or "TFDIST_RUN_ID" in context.environ
    if first <= port <= last and not is_temporary:
        found = f"{port} is free, but Linux gives ports from {first} to {last} to any program"
        expected = f"a port below {first}: before the training starts, another program may get this one"
        return Finding(WARNING, "own port", found, expected, "Choose a lower port, for example 2222.")
    return Finding(OK, "own port", f"{port} is free")


def taken_port(context: CheckContext, port: int, error: OSError) -> Finding:
    """Returns the finding for a port that is not available."""
    holders = holders_of(port, context.root)
    who = f"; {', '.join(holders)} listens on it" if holders else ""
    how = " (TFDIST_PORT)" if context.config is not None and context.config.source in ("Slurm", "Kubernetes") else ""
    remedy = (
        f"End that process if it is left from an earlier run, or choose another port for this task on all hosts{how}."
    )
    if not holders and os.geteuid():
        remedy = f"{remedy} (For a process of another user: sudo ss -ltnp 'sport = :{port}'.)"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return Finding(ERROR, "own port", f"{port}: {reason}{who}", f"port {port} to be free", remedy)


def holders_of(port: int, root: Path = Path("/")) -> list[str]:
    """Returns the processes that listen on a TCP port, for example `"process 12 (python train.py)"`.

    Processes that this user may not inspect are left out.

    Args:
        port: The port.
        root: Directory that contains `proc`.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in _read(root / "proc/net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    holders = []
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)) if inodes else ():
        if inodes & set(_descriptors(process)):
            command = printable(_read(process / "cmdline").replace("\0", " ").strip())
            holders.append(f"process {process.name} ({command[:80]})")
    return holders


def _descriptors(process: Path) -> list[str]:
    targets: list[str] = []
    with contextlib.suppress(OSError):  # another user's process, or it has exited
        for descriptor in os.listdir(process / "fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                targets.append(os.readlink(process / "fd" / descriptor))
    return targets


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
