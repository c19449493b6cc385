"""A network of the run's own.

TensorFlow's gRPC server listens on all interfaces, whatever the address in TF_CONFIG, and runs whatever anyone sends
it. In a network namespace with nothing but loopback only the workers of the run can reach it.
"""

import dataclasses
import fcntl
import os
import socket
import struct
import warnings
from pathlib import Path

from tfdist.launch.errors import UsageError
from tfdist.launch.linux import CLONE_NEWNET, CLONE_NEWUSER, unshare

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_IFREQ = struct.Struct("16sh22x")


@dataclasses.dataclass(frozen=True)
class Network:
    """Which network the workers use.

    Args:
        private: Whether it is a namespace of the run's own.
        refusal: Why it is not, where it should have been.
    """

    private: bool
    refusal: str = ""

    def describe(self) -> str:
        """Returns the line that says so at the start."""
        if self.private:
            return "private network: only the workers reach each other (scripts that need the internet: --network host)"
        if self.refusal:
            return (
                f"warning: host network, as a private one is not permitted here ({self.refusal}): the workers' ports "
                "can be reached by others without authentication (--network host says that this is known)"
            )
        return "host network: the workers' ports can be reached by others without authentication"


def choose_network(mode: str) -> Network:
    """Moves this process into a network namespace where `mode` asks for it and the host permits it.

    Must be called while the process has one thread, and before any port is chosen.

    Args:
        mode: `"private"`, `"auto"` (private where permitted) or `"host"`.

    Raises:
        UsageError: If `mode` is `"private"` and the host does not permit it.
    """
    if mode == "host":
        return Network(private=False)
    refusal = _refusal()
    if not refusal:
        enter_private_network()
        return Network(private=True)
    if mode == "private":
        raise UsageError(
            f"A private network is not permitted here. Received: --network private, and the host says: {refusal}. "
            "Expected: root with CAP_SYS_ADMIN, or a host that permits user namespaces. Use --network host where "
            "others cannot reach this host's ports."
        )
    return Network(private=False, refusal=refusal)


def enter_private_network() -> None:
    """Moves this process into a new network namespace with loopback up.

    Raises:
        OSError: If a step is not permitted. The process may be half-way then: try in a child first.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWNET)
    except PermissionError:
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _bring_loopback_up()


def _refusal() -> str:
    """Returns why a private network is not permitted, or an empty string where it is.

    Tried in a child, because some hosts permit the namespace and then refuse to bring loopback up inside, and there is
    no way back.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads; only a caller other than the command line can have any.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            enter_private_network()
            _use_loopback()
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


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = _IFREQ.pack(b"lo", 0)
        _, flags = _IFREQ.unpack(fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def _use_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
