"""A private network for the processes of a run: a network namespace that has only the loopback interface.

TensorFlow's gRPC server, which parameter servers and stages need, listens on all interfaces, whatever the address in
TF_CONFIG, and runs any graph that it receives. In the namespace only the processes of the run can reach it.
"""

import fcntl
import os
import socket
import struct
from pathlib import Path

from tfdist.utils.argument_checks import UsageError
from tfdist.utils.linux_syscalls import CLONE_NEWNET, CLONE_NEWUSER, fork, unshare

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_IFREQ = struct.Struct("16sh22x")


def choose_network(mode: str, *, has_servers: bool) -> str:
    """Moves this process into a network namespace if `mode` requests it and the host permits it.

    Call this while the process has one thread, and before any port is chosen. `mode` is `"private"`, `"auto"`
    (private if there are servers and the host permits it) or `"host"`; `has_servers` says whether processes of the run
    start TensorFlow's server. Returns the message for the user, or an empty string.
    """
    if mode == "host" or (mode == "auto" and not has_servers):
        return "host network: others can reach the workers' ports without authentication" if has_servers else ""
    denial = _denial()
    if not denial:
        enter_private_network()
        return "private network: only the workers reach each other (scripts that need the internet: --network host)"
    if mode == "private":
        raise UsageError(
            f"A private network is not permitted here. Received: --network private, and the host reports: {denial}. "
            "Expected: root with CAP_SYS_ADMIN, or a host that permits user namespaces. Use --network host if others "
            "cannot reach the ports of this host."
        )
    return (
        f"warning: host network, because a private one is not permitted here ({denial}): others can reach the workers' "
        "ports without authentication (--network host silences this warning)"
    )


def enter_private_network() -> None:
    """Moves this process into a new network namespace and enables loopback.

    After an OSError earlier steps are not undone: try in a child process first.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWNET)
    except PermissionError:
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = _IFREQ.pack(b"lo", 0)
        _, flags = _IFREQ.unpack(fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def _denial() -> str:
    """Returns why a private network is not permitted, or an empty string if it is.

    A child process tries it, because some hosts permit the namespace but not to enable loopback in it, and a process
    cannot leave the namespace.
    """
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        status = 1
        try:
            enter_private_network()
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_connection(server.getsockname(), timeout=5).close()
            status = 0
        except OSError as error:
            os.write(writer, (error.strerror or str(error)).encode()[:400])
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        reason = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return "" if status == 0 else reason or f"the trial ended with status {status}"
