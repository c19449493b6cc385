"""Checks this task's name, address, port and token, and that no proxy is between the tasks."""

import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from tfdist.doctor.check_context import CheckContext, host_of
from tfdist.doctor.report import ERROR, OK, WARNING, Finding
from tfdist.utils.cores_and_ports import is_loopback, listen_on_all_interfaces, temporary_ports
from tfdist.utils.formatting import printable

# gRPC uses the first proxy that is set (lower case only), except for the hosts in the first list that is set.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXIES = ("no_grpc_proxy", "no_proxy")


def check_own_name(context: CheckContext) -> list[Finding]:
    """Checks that the hostname resolves, as gRPC and many libraries expect."""
    del context
    name = socket.gethostname()
    try:
        addresses = addresses_of(name)
    except OSError as error:
        remedy = f"Add a line '<address> {name}' to /etc/hosts, or repair the name server."
        return [Finding(WARNING, "own name", f"{name}: {error.strerror}", "a name that resolves", remedy)]
    return [Finding(OK, "own name", f"{name} is {', '.join(addresses)}")]


def check_own_address(context: CheckContext) -> list[Finding]:
    """Checks that this task's address in the cluster is an address of this machine."""
    if context.task not in context.addresses:
        return []
    host = host_of(context.addresses[context.task])
    try:
        addresses = addresses_of(host)
    except OSError as error:
        remedy = f"Correct the address of {context.task} in the cluster's description, or repair the name server."
        return [Finding(ERROR, "own address", f"{host}: {error.strerror}", "a name that resolves", remedy)]
    shown = host if addresses == [host] else f"{host} is {', '.join(addresses)}"
    if any(map(is_own, addresses)):
        is_one_host = len({host_of(address) for address in context.addresses.values()}) == 1
        if is_one_host or not all(map(is_loopback, addresses)):
            return [Finding(OK, "own address", shown)]
        expected = "an address at which other hosts reach this host"
        remedy = f"Use an address of the network; if {host} is this host's name, correct /etc/hosts."
        return [Finding(ERROR, "own address", f"{shown}, which is this host's loopback", expected, remedy)]
    remedy = (
        f"Start this task on {host}, or correct the task's index or its address. With network address translation "
        "(some containers) this may be correct."
    )
    expected = f"an address of this machine for {context.task}"
    return [Finding(WARNING, "own address", f"{shown}, which this machine does not have", expected, remedy)]


def addresses_of(host: str) -> list[str]:
    """Returns the addresses to which a name resolves, each once, in the resolver's order; raises an OSError for others.

    >>> addresses_of("127.0.0.1")
    ['127.0.0.1']
    """
    try:
        address_infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "not a hostname") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in address_infos))


def is_own(address: str) -> bool:
    """Returns whether an address belongs to this machine, which means that it can be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def check_token(context: CheckContext) -> list[Finding]:
    """Checks that the workers of several hosts have a secret, by which they admit each other."""
    if len({host_of(address) for address in context.addresses.values()}) < 2:
        return []
    if context.environ.get("TFDIST_TOKEN", "").strip():
        return [Finding(OK, "token", "TFDIST_TOKEN is set")]
    found = "TFDIST_TOKEN is not set: who knows the addresses of the cluster can join as a worker"
    remedy = "Set the same secret on all workers, or start them by tfdist run --nodes, which takes it."
    return [Finding(WARNING, "token", found, "a secret that all workers have", remedy)]


def check_proxy(context: CheckContext) -> list[Finding]:
    """Checks that gRPC does not send the messages between tasks to an HTTP proxy."""
    variable = next((name for name in _PROXIES if name in context.environ), "")
    if not variable or not context.environ[variable]:
        return [Finding(OK, "proxy", "none for gRPC")]
    found = f"{variable}={without_password(context.environ[variable])}"
    exceptions = next((name for name in _NO_PROXIES if name in context.environ), "")
    found += f", {exceptions}={context.environ[exceptions]}" if exceptions else ", no_proxy not set"
    # This task's host counts, too: the first task dials itself.
    hosts = {host_of(address): None for address in context.addresses.values()}
    proxied = [host for host in hosts if not bypasses_proxy(host, context.environ)]
    if proxied and set(context.config.cluster.jobs if context.config else ()) == {"worker"}:
        found = f"{found}: NCCL and TensorFlow's own strategies would connect through it to {', '.join(proxied)}"
        remedy = f"None for tfdist's strategy. For the others unset {variable}, or set no_grpc_proxy."
        expected = "no proxy; MultiWorkerMirroredStrategy connects without it"
        return [Finding(WARNING, "proxy", found, expected, remedy)]
    if proxied:
        remedy = f"unset {variable}, or export no_grpc_proxy={','.join(hosts)} on every host."
        found = f"{found}: gRPC connects through the proxy to {', '.join(proxied)}"
        expected = "no proxy between the tasks, with which TensorFlow would wait indefinitely"
        return [Finding(ERROR, "proxy", found, expected, remedy)]
    if hosts:
        return [Finding(OK, "proxy", f"{found}: not used between the tasks")]
    remedy = f"Before a training on several hosts unset {variable}, or list all hosts in no_grpc_proxy."
    return [Finding(WARNING, "proxy", found, "no proxy for gRPC between workers", remedy)]


def bypasses_proxy(host: str, environ: Mapping[str, str]) -> bool:
    """Returns whether gRPC connects to `host` without the proxy.

    It does if the host ends with an entry of `no_grpc_proxy`, else of `no_proxy`, or lies in the subnet of an entry.

    >>> bypasses_proxy("node1.cluster", {"no_proxy": "localhost,.cluster"}), bypasses_proxy("10.0.0.7", {})
    (True, False)
    >>> bypasses_proxy("10.0.0.7", {"no_grpc_proxy": "10.0.0.0/24"})
    True
    """
    text = next((environ[name] for name in _NO_PROXIES if name in environ), "")
    entries = [entry.strip().lower() for entry in text.split(",") if entry.strip()]
    return any(host.lower().endswith(entry) or _is_in_subnet(host, entry) for entry in entries)


def without_password(url: str) -> str:
    """Returns a URL without user and password.

    >>> without_password("http://me:secret@proxy:3128")
    'http://...@proxy:3128'
    """
    return re.sub(r"//[^/@]*@", "//...@", url)


def _is_in_subnet(host: str, entry: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


_LISTEN_STATE = "0A"
_LOOPBACK = ("127.0.0.1", "localhost")


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens where TensorFlow's server will: on all interfaces, or on loopback for such a host.

    If the port is not available, it raises an OSError.
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
    """Returns the processes on a TCP port that this user may inspect, as `"process 12 (python train.py)"`."""
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
