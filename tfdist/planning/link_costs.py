"""What transfers cost on a link, by the alpha-beta model of the exchange between workers, and without a network.

A message of `n` bytes takes `latency + n / bandwidth` seconds (Hockney 1994). All workers send to all others at once:
each sends every owner its part of a sum, and returns its own part (`docs/architecture.md`, "The life of an exchange").
That is as much as in a ring, the least that is possible (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations").

What transfers cost without a network, by kind and size, follows from measurements between two processes. The cores copy
and add what is sent and received, so an exchange of more members costs as much as one of two members in which each
sends as many bytes, and a message for each further member in each round.
"""

import dataclasses
from collections.abc import Sequence

from tfdist.planning.measurements import EXCHANGE, GATHER, MESSAGE, SUM, TransferMeasurement
from tfdist.utils.sum_copies import is_short_sum, sum_copies

# Of the 1538 bytes that a full Ethernet frame occupies on the wire (IEEE 802.3: preamble, header, checksum, gap) 1448
# are TCP's payload, after headers of IP (20 bytes) and of TCP with time stamps (32 bytes, RFC 7323).
ETHERNET_PAYLOAD = 1448 / 1538


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """A connection between two workers, in each direction."""

    bytes_per_second: float  # the bandwidth of one direction
    latency_seconds: float = 0.0  # from the call that sends to the first byte that is received, half a round trip

    @classmethod
    def ethernet(cls, bits_per_second: float, latency_seconds: float = 0.0) -> "LinkSpeed":
        """Returns what TCP has of an Ethernet link of a nominal rate.

        >>> round(8 * LinkSpeed.ethernet(1e9).bytes_per_second / 1e6)
        941
        """
        return cls(bits_per_second / 8 * ETHERNET_PAYLOAD, latency_seconds)


def sent_bytes(kind: str, nbytes: float, members: int) -> float:
    """Returns what each member sends in a collective of tensors of `nbytes`.

    In a sum it sends `2 (N - 1) / N` times the tensor, or a short one to all others; if all members get all tensors,
    `N - 1` tensors; in an exchange each other member gets a slice, `(N - 1) / N` of the tensor together.

    >>> sent_bytes("sum", 12e6, 1), sent_bytes("sum", 12e6, 2), sent_bytes("sum", 12e6, 4), sent_bytes("sum", 12.0, 4)
    (0.0, 12000000.0, 18000000.0, 36.0)
    >>> sent_bytes("gather", 12.0, 2), sent_bytes("gather", 12.0, 4), sent_bytes("exchange", 12.0, 4)
    (12.0, 36.0, 9.0)
    """
    if kind == SUM:
        return sum_copies(nbytes, members) * nbytes
    return {GATHER: members - 1, EXCHANGE: (members - 1) / members}[kind] * nbytes


def messages(kind: str, nbytes: float, members: int) -> int:
    """Returns how many messages follow one another: the parts and the sums; those to different members do not wait.

    >>> messages("sum", 12e6, 4), messages("sum", 12.0, 4), messages("gather", 12e6, 4), messages("exchange", 12e6, 4)
    (2, 1, 1, 1)
    """
    return 0 if members == 1 else 2 if kind == SUM and not is_short_sum(nbytes, members) else 1


def collective_seconds(kind: str, nbytes: float, members: int, link: LinkSpeed) -> float:
    """Returns how long a collective takes on links alone: its messages in turn.

    >>> link = LinkSpeed(1e6, latency_seconds=0.5)
    >>> [collective_seconds(kind, 9e6, 3, link) for kind in ("sum", "gather", "exchange")]
    [13.0, 18.5, 6.5]
    """
    waits = messages(kind, nbytes, members) * link.latency_seconds
    return waits + sent_bytes(kind, nbytes, members) / link.bytes_per_second


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Returns the value at `x` of the line through neighbouring points; beyond them through the two nearest.

    The points have different `x`, in increasing order. A line that falls below zero gives 0.

    >>> interpolate([(0.0, 1.0), (10.0, 2.0), (20.0, 4.0)], 5.0), interpolate([(10.0, 2.0), (20.0, 4.0)], 30.0)
    (1.5, 6.0)
    >>> interpolate([(10.0, 3.0)], 99.0), interpolate([(10.0, 1.0), (20.0, 9.0)], 1.0)
    (3.0, 0.0)
    """
    if len(points) == 1:
        return points[0][1]
    last = next((index for index, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(last, 1) - 1], points[max(last, 1)]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)


@dataclasses.dataclass(frozen=True)
class TransferCosts:
    """Seconds of exchanges on a machine, without a limit on the link.

    >>> measured = [TransferMeasurement("sum", size, 1e-3 + size * 2e-9, size * 1e-9) for size in (1000, 10**6)]
    >>> costs = TransferCosts(tuple(measured))
    >>> round(costs.core_seconds("sum", 2e6, members=2), 6), round(costs.core_seconds("sum", 2e6, members=4), 6)
    (0.002, 0.003)
    """

    measured: tuple[TransferMeasurement, ...]  # exchanges of two members

    def seconds(self, kind: str, nbytes: float, members: int) -> float:
        """Returns the time of an exchange alone, from the call to the result."""
        return self._cost(kind, nbytes, members, "seconds")

    def core_seconds(self, kind: str, nbytes: float, members: int) -> float:
        """Returns how long a core of each member is busy with an exchange: copies, system calls, sums."""
        return self._cost(kind, nbytes, members, "core_seconds")

    def _cost(self, kind: str, nbytes: float, members: int, name: str) -> float:
        if members == 1:
            return 0.0
        points = sorted(
            (float(measurement.nbytes), getattr(measurement, name))
            for measurement in self.measured
            if measurement.kind == kind
        )
        of_two = sent_bytes(kind, nbytes, members) / sent_bytes(kind, 1.0, 2)
        message = sum(getattr(measurement, name) for measurement in self.measured if measurement.kind == MESSAGE)
        return interpolate(points, of_two) + (members - 2) * messages(kind, nbytes, members) * message
