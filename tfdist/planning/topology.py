"""Networks of racks: which link bounds an exchange of workers in several racks.

Each worker has a host, which has a port to the switch of its rack, and each rack has an uplink, which its hosts share.
Workers fill the racks in the order of their ranks.
"""

import argparse
import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from tfdist.planning.link_costs import Link
from tfdist.planning.units import bits_per_second, duration_seconds


@dataclasses.dataclass(frozen=True)
class Topology:
    """A network of hosts."""

    text: str  # as the user has described it
    # the link of a host to its rack's switch, in each direction; its latency is that between two hosts of a rack
    port: Link
    # the link of a rack to the others, in each direction, for all of its hosts together; its latency is that between
    # two hosts of different racks. None: all hosts are connected by one switch that is never full.
    uplink: Link | None = None
    hosts_per_rack: int = 1
    racks: int | None = None  # the number of racks that exist; None: as many as the workers need

    @property
    def hosts(self) -> int | None:
        """The number of hosts; None: as many as needed.

        >>> parse_topology("rack:8x4,10gbit/1gbit").hosts
        32
        """
        return None if self.racks is None else self.racks * self.hosts_per_rack

    def rack(self, worker: int) -> int:
        """Returns the rack of a worker."""
        return 0 if self.uplink is None else worker // self.hosts_per_rack

    def link(self, workers: int) -> Link:
        """Returns what each of the first `workers` workers has of the network while all send to all others.

        Every host of a rack sends to every host of the others, over the uplink: the busiest link sets the pace.

        >>> network = parse_topology("rack:8x4,10gbit,0.1ms/10gbit,0.5ms")
        >>> [round(8e-9 * network.link(workers).bytes_per_second, 1) for workers in (2, 8, 10, 32)]
        [9.4, 9.4, 5.3, 1.5]
        """
        if self.uplink is None or workers <= self.hosts_per_rack:
            return self.port
        sizes = Counter(self.rack(worker) for worker in range(workers))
        messages = max(size * (workers - size) for size in sizes.values())
        per_message = max(
            (workers - 1) / self.port.bytes_per_second,
            messages / self.uplink.bytes_per_second,
        )
        return Link((workers - 1) / per_message, self.uplink.latency_seconds)


def parse_topology(text: str) -> Topology:
    """Parses `flat,RATE[,LATENCY]` or `rack:HOSTS[xRACKS],RATE[,LATENCY]/RATE[,LATENCY]`.

    `HOSTS` is the number of hosts of a rack; without `RACKS` there are as many racks as needed. The first rate is that
    of a host's port, the second one that of a rack's uplink, which its hosts share. Rates are nominal ones of Ethernet.

    >>> parse_topology("rack:8,10gbit,0.05ms/1gbit,0.5ms").uplink.latency_seconds
    0.0005
    >>> parse_topology("rack:8x8,10gbit")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: Invalid topology. Received: 'rack:8x8,10gbit'. Expected: flat,RATE[,LATENCY] or
    rack:HOSTS[xRACKS],RATE[,LATENCY]/RATE[,LATENCY], for example rack:8x8,10gbit/1gbit: racks of 8 hosts, 8 of them,
    10 Gbit/s from a host to its rack, and 1 Gbit/s from a rack to the others, which its hosts share.
    """
    links = text.lower().replace("bit/s", "bit")
    match = re.fullmatch(r"(?:(flat)|rack:([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?),([^/]+)(?:/([^/]+))?", links)
    if not match or bool(match[1]) != (match[5] is None):
        raise argparse.ArgumentTypeError(
            f"Invalid topology. Received: {text!r}. Expected: flat,RATE[,LATENCY] or "
            "rack:HOSTS[xRACKS],RATE[,LATENCY]/RATE[,LATENCY], for example rack:8x8,10gbit/1gbit: racks of 8 hosts, 8 "
            "of them, 10 Gbit/s from a host to its rack, and 1 Gbit/s from a rack to the others, which its hosts share."
        )
    port = parse_link(match[4])
    if match[1]:
        return Topology(text, port)
    return Topology(text, port, parse_link(match[5]), int(match[2]), int(match[3]) if match[3] else None)


def parse_link(text: str) -> Link:
    """Parses `RATE[,LATENCY]`, the nominal rate of an Ethernet link.

    >>> parse_link("1gbit,0.1ms").latency_seconds
    0.0001
    """
    parts: Sequence[str] = text.split(",")
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(
            f"Invalid link. Received: {text!r}. Expected: RATE or RATE,LATENCY, for example 1gbit,0.1ms."
        )
    return Link.ethernet(bits_per_second(parts[0]), duration_seconds(parts[1]) if len(parts) == 2 else 0.0)
