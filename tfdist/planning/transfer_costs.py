"""What exchanges cost without a network: by kind and size, from measurements between two processes.

The cores copy and add what is sent and received, so an exchange of more members costs as much as one of two members in
which each sends as many bytes, and a message for each further member in each round.
"""

import dataclasses
from collections.abc import Sequence

from tfdist.planning.link_costs import messages, sent_bytes
from tfdist.planning.measurements import MESSAGE, TransferMeasurement


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Returns the value at `x` of the line through neighbouring points; beyond them through the two nearest.

    >>> interpolate([(0.0, 1.0), (10.0, 2.0), (20.0, 4.0)], 5.0), interpolate([(10.0, 2.0), (20.0, 4.0)], 30.0)
    (1.5, 6.0)
    >>> interpolate([(10.0, 3.0)], 99.0), interpolate([(10.0, 1.0), (20.0, 9.0)], 1.0)
    (3.0, 0.0)

    Args:
        points: At least one, by different `x` in increasing order.
        x: Where. A line that falls below zero gives 0.
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

    Attributes:
        measured: Exchanges of two members.
    """

    measured: tuple[TransferMeasurement, ...]

    def seconds(self, kind: str, nbytes: float, members: int) -> float:
        """Returns the time of an exchange alone, from the call to the result."""
        return self._cost(kind, nbytes, members, "seconds")

    def core_seconds(self, kind: str, nbytes: float, members: int) -> float:
        """Returns how long a core of each member is busy with an exchange: copies, system calls, sums."""
        return self._cost(kind, nbytes, members, "core_seconds")

    def _cost(self, kind: str, nbytes: float, members: int, name: str) -> float:
        if members == 1:
            return 0.0
        points = sorted((float(one.nbytes), getattr(one, name)) for one in self.measured if one.kind == kind)
        of_two = sent_bytes(kind, nbytes, members) / sent_bytes(kind, 1.0, 2)
        message = sum(getattr(one, name) for one in self.measured if one.kind == MESSAGE)
        return interpolate(points, of_two) + (members - 2) * messages(kind, nbytes, members) * message
