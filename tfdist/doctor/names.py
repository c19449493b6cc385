"""Whether this machine finds itself: its own name, and its address in the cluster."""

import errno
import socket

from tfdist.doctor.finding import ERROR, OK, WARNING, Finding
from tfdist.doctor.situation import Situation, host_of


def check_own_name(situation: Situation) -> list[Finding]:
    """Whether the machine's own name resolves, as gRPC and many libraries expect."""
    del situation
    name = socket.gethostname()
    try:
        found = addresses_of(name)
    except OSError as error:
        remedy = f"Add a line '<address> {name}' to /etc/hosts, or repair the name server."
        return [Finding(WARNING, "own name", f"{name}: {error.strerror}", "a name that resolves", remedy)]
    return [Finding(OK, "own name", f"{name} is {', '.join(found)}")]


def check_own_address(situation: Situation) -> list[Finding]:
    """Whether this task's address in the cluster is one of this machine."""
    if situation.task not in situation.addresses:
        return []
    host = host_of(situation.addresses[situation.task])
    try:
        addresses = addresses_of(host)
    except OSError as error:
        remedy = f"Correct the address of {situation.task} in the cluster's description, or repair the name server."
        return [Finding(ERROR, "own address", f"{host}: {error.strerror}", "a name that resolves", remedy)]
    shown = host if addresses == [host] else f"{host} is {', '.join(addresses)}"
    if any(map(is_own, addresses)):
        is_alone = len({host_of(address) for address in situation.addresses.values()}) == 1
        if is_alone or not all(_is_loopback(address) for address in addresses):
            return [Finding(OK, "own address", shown)]
        expected = "an address at which other hosts reach this one"
        remedy = f"Write an address of the network instead; where {host} is this host's name, correct /etc/hosts."
        return [Finding(ERROR, "own address", f"{shown}, which is this host's loopback", expected, remedy)]
    remedy = (
        f"Start this task on {host}, or correct the task's index or its address. Behind a translation of addresses "
        "(some containers) all may be well."
    )
    expected = f"an address of this machine for {situation.task}"
    return [Finding(WARNING, "own address", f"{shown}, which this machine does not have", expected, remedy)]


def addresses_of(host: str) -> list[str]:
    """Returns the addresses that a name stands for, each once, in the resolver's order.

    Raises:
        OSError: If it does not resolve.

    >>> addresses_of("127.0.0.1")
    ['127.0.0.1']
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "not a name of a host") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_own(address: str) -> bool:
    """Whether an address belongs to this machine: only its own can be bound."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
