"""Whether the port of this task is free, and who has it where it is not."""

import contextlib
import os
import socket
from pathlib import Path

from tfdist.doctor.finding import ERROR, OK, WARNING, Finding, printable
from tfdist.doctor.situation import Situation

_LISTENS = "0A"
_LOOPBACK = ("127.0.0.1", "localhost")


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens as TensorFlow's server will: on all interfaces, on loopback alone for such a host.

    Raises:
        OSError: If the port cannot be had.
    """
    if host in _LOOPBACK:
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def free_port(situation: Situation, host: str, port: int) -> Finding:
    """Returns the finding for a port that could be listened on."""
    first, last = _ephemeral_ports(situation.root)
    is_chosen_for_now = host in _LOOPBACK or "TFDIST_RUN_ID" in situation.environ
    if first <= port <= last and not is_chosen_for_now:
        found = f"{port} is free, but from the range {first} to {last}, which Linux hands out by itself"
        expected = f"a port below {first}: before the training starts another program may be given this one"
        return Finding(WARNING, "own port", found, expected, "Choose a lower port, for example 2222.")
    return Finding(OK, "own port", f"{port} is free")


def taken_port(situation: Situation, port: int, error: OSError) -> Finding:
    """Returns the finding for a port that could not be listened on."""
    holders = holders_of(port, situation.root)
    who = f"; {', '.join(holders)} listens on it" if holders else ""
    remedy = "End that process if it is left from an earlier run, or choose another port for this task everywhere."
    if not holders and os.geteuid():
        remedy = f"{remedy} (Another user's process: sudo ss -ltnp 'sport = :{port}' names it.)"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return Finding(ERROR, "own port", f"{port}: {reason}{who}", f"port {port} to be free", remedy)


def holders_of(port: int, root: Path = Path("/")) -> list[str]:
    """Returns who listens on a TCP port, as `"process 12 (python train.py)"`: those that this user may look at.

    Args:
        port: The port.
        root: Where `proc` is found.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in _read(root / "proc/net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    holders = []
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)) if inodes else ():
        if inodes & set(_descriptors(process)):
            command = printable(_read(process / "cmdline").replace("\0", " ").strip())
            holders.append(f"process {process.name} ({command[:80]})")
    return holders


def _descriptors(process: Path) -> list[str]:
    opened: list[str] = []
    with contextlib.suppress(OSError):  # another user's, or gone
        for descriptor in os.listdir(process / "fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                opened.append(os.readlink(process / "fd" / descriptor))
    return opened


def _ephemeral_ports(root: Path) -> tuple[int, int]:
    words = _read(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else (1, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
