"""Hosts in miniature: network namespaces joined by a pair of virtual interfaces, gone at the end."""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace with one `interface` beside its loopback."""

    namespace: str
    interface: str
    address: str

    def start(self, command: Sequence[str], **arguments: object) -> "subprocess.Popen[str]":
        """Starts `command` within; `ip netns exec` becomes the command, so that its pid is the process's own."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *command], text=True, **arguments)  # type: ignore[call-overload]

    def set_link(self, state: str) -> None:
        """Cuts the cable (`"down"`), or connects it again (`"up"`); no connection is closed."""
        _ip("-n", self.namespace, "link", "set", self.interface, state)


def why_not() -> str:
    """Why this host permits no network namespaces; empty if it does."""
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    if os.geteuid():
        return "network namespaces with names take root"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"this host permits no network namespaces: {error.stderr.strip()}"


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two hosts that reach each other and nobody else."""
    mark = f"{os.getpid():x}{next(_numbers)}"  # names of interfaces have at most 15 characters
    hosts = [
        Host(f"tfdist-{mark}-{side}", f"t{mark}{side}", f"10.77.0.{number}") for side, number in (("a", 1), ("b", 2))
    ]
    with contextlib.ExitStack() as undo:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            # Removing a namespace removes the interfaces within, once its processes have ended.
            undo.callback(_ip, "netns", "delete", host.namespace)
        first, second = hosts
        peer = ("peer", "name", second.interface, "netns", second.namespace)
        _ip("-n", first.namespace, "link", "add", first.interface, "type", "veth", *peer)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
