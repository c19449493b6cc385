"""What plans are searched for: links, memory and cores of the workers, and which numbers may change."""

import dataclasses
from collections.abc import Sequence

from tfdist.planning.link_costs import Link


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The machines, and what the user allows.

    Attributes:
        link: The connection of each worker.
        memory_bytes: What a worker may use.
        cores: Cores of a worker. Steps are measured on as many.
        devices: Devices of a worker, each of which computes as the measured one.
        allow_compression: Whether gradients may be rounded.
        allow_local_updates: Whether updates may be computed from other weights or batches than the program's: local
            updates, asynchronous parameter servers, accumulation over several batches.
        speeds: Measured speeds of the workers, in any unit; empty: equal.
    """

    link: Link
    memory_bytes: int
    cores: int = 1
    devices: int = 1
    allow_compression: bool = False
    allow_local_updates: bool = False
    speeds: Sequence[float] = ()
