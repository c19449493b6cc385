"""Networks of racks: which link bounds an exchange of workers in several racks.

Each worker has a host, which has a port to the switch of its rack, and each rack has an uplink, which its hosts share.
Workers fill the racks in the order of their ranks.
"""

import argparse
import dataclasses
import math
import re
from collections import Counter

from tfdist.planning.link_costs import LinkSpeed

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LINK = r"([^/\s]*[^/\s,])"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A network of hosts."""

    text: str  # as the user has described it
    # the link of a host to its rack's switch, in each direction; its latency is that between two hosts of a rack
    port: LinkSpeed
    # the link of a rack to the others, in each direction, for all of its hosts together; its latency is that between
    # two hosts of different racks. None: all hosts are connected by one switch that is never full.
    uplink: LinkSpeed | None = None
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
        return 0 if self.uplink is None else worker // self.hosts_per_rack

    def link(self, workers: int) -> LinkSpeed:
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
        per_message = max((workers - 1) / self.port.bytes_per_second, messages / self.uplink.bytes_per_second)
        return LinkSpeed((workers - 1) / per_message, self.uplink.latency_seconds)


def parse_topology(text: str) -> Topology:
    """Parses `flat,RATE[,LATENCY]` or `rack:HOSTS[xRACKS],RATE[,LATENCY]/RATE[,LATENCY]`.

    `HOSTS` is the number of hosts of a rack; without `RACKS` there are as many racks as needed. The first rate is that
    of a host's port, the second one that of a rack's uplink, which its hosts share. Rates are nominal ones of Ethernet.

    >>> parse_topology("rack:8,10gbit,0.05ms/1gbit,0.5ms").uplink.latency_seconds
    0.0005
    """
    links = text.lower().replace("bit/s", "bit")
    match = re.fullmatch(rf"(?:(flat)|rack:([1-9]\d{{0,5}})(?:x([1-9]\d{{0,5}}))?),{_LINK}(?:/{_LINK})?", links)
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


def parse_link(text: str) -> LinkSpeed:
    """Parses `RATE[,LATENCY]`, the nominal rate of an Ethernet link, and returns what TCP gets of it.

    >>> parsed = parse_link("1gbit,0.1ms")
    >>> round(8 * parsed.bytes_per_second / 1e6), parsed.latency_seconds
    (941, 0.0001)
    """
    rate, *latencies = (part.strip() for part in text.split(","))
    if len(latencies) > 1:
        raise argparse.ArgumentTypeError(
            f"Invalid link. Received: {text!r}. Expected: RATE or RATE,LATENCY, for example 1gbit,0.1ms."
        )
    return LinkSpeed.ethernet(bits_per_second(rate), duration_seconds(latencies[0]) if any(latencies) else 0.0)


def bits_per_second(text: str) -> float:
    """Parses the nominal rate of a link.

    >>> bits_per_second("1gbit"), bits_per_second("300Mbit/s")
    (1000000000.0, 300000000.0)
    """
    rate = _quantity(text.lower().removesuffix("/s"), _BITS)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(
            f"Invalid rate of a link. Received: {text!r}. Expected: a number above 0 and a unit of "
            f"{', '.join(_BITS)}, for example 1gbit."
        )
    return rate


def duration_seconds(text: str) -> float:
    """Parses a duration with its unit.

    >>> duration_seconds("0.5ms"), duration_seconds("30d")
    (0.0005, 2592000.0)
    """
    seconds = _quantity(text.lower(), _SECONDS)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"Invalid duration. Received: {text!r}. Expected: a number of at least 0 and a unit of "
            f"{', '.join(_SECONDS)}, for example 0.5ms or 30d."
        )
    return seconds


def _quantity(text: str, units: dict[str, float]) -> float:
    """Returns the number times its unit; NaN if the text is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    return float(match[1]) * units[match[2]] if match and match[2] in units else math.nan
