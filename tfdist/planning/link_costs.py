"""What transfers cost on a link: the alpha-beta model of collectives.

A message of `n` bytes takes `latency + n / bandwidth` seconds. Sources: Hockney 1994 (the model); Patarasuk and Yuan
2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (the ring); Thakur et al. 2005 (all-gather).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection between two workers, in each direction.

    >>> gigabit = Link(bytes_per_second=125e6, latency_seconds=1e-4)
    >>> gigabit.transfer_seconds(1.25e6)
    0.0101

    Attributes:
        bytes_per_second: The bandwidth of one direction.
        latency_seconds: From the call that sends to the first byte that is received, half a round trip.
        cpu_seconds_per_byte: How long a core of each end is busy with a byte: copies, checksums, system calls.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    cpu_seconds_per_byte: float = 0.0

    def transfer_seconds(self, nbytes: float) -> float:
        """Returns how long a message takes."""
        return self.latency_seconds + nbytes / self.bytes_per_second


def all_reduce_bytes(nbytes: float, members: int) -> float:
    """Returns what each member of a ring sends: `2 (N - 1) / N` times the tensor.

    >>> all_reduce_bytes(12.0, 1), all_reduce_bytes(12.0, 2), all_reduce_bytes(12.0, 4)
    (0.0, 12.0, 18.0)
    """
    return 2 * (members - 1) / members * nbytes


def all_gather_bytes(nbytes: float, members: int) -> float:
    """Returns what each member sends if all members get all tensors of `nbytes`: `N - 1` tensors.

    >>> all_gather_bytes(12.0, 2), all_gather_bytes(12.0, 4)
    (12.0, 36.0)
    """
    return (members - 1) * nbytes


def all_to_all_bytes(nbytes: float, members: int) -> float:
    """Returns what each member sends of a tensor of which each other member gets a slice: `(N - 1) / N` of it.

    >>> all_to_all_bytes(12.0, 2), all_to_all_bytes(12.0, 4)
    (6.0, 9.0)
    """
    return (members - 1) / members * nbytes


def all_reduce_seconds(nbytes: float, members: int, link: Link) -> float:
    """Returns the time of a ring all-reduce: `2 (N - 1)` messages in turn, each of a chunk of `nbytes / N`.

    >>> all_reduce_seconds(8e6, 2, Link(1e6, 0.5)), all_reduce_seconds(8e6, 1, Link(1e6, 0.5))
    (9.0, 0.0)
    """
    return 2 * (members - 1) * link.transfer_seconds(nbytes / members)


def all_gather_seconds(nbytes: float, members: int, link: Link) -> float:
    """Returns the time of a ring all-gather: `N - 1` messages in turn, each of a tensor.

    >>> all_gather_seconds(8e6, 3, Link(1e6, 0.5))
    17.0
    """
    return (members - 1) * link.transfer_seconds(nbytes)


def all_to_all_seconds(nbytes: float, members: int, link: Link) -> float:
    """Returns the time of an all-to-all: a slice to each other member, which share the sender's link.

    >>> all_to_all_seconds(9e6, 3, Link(1e6, 0.5))
    7.0
    """
    return (members - 1) * link.transfer_seconds(nbytes / members)
