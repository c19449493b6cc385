"""What TensorFlow's collectives cost without a network: by kind and size, from measurements between two processes.

An exchange of more members consists of the same messages: a ring all-reduce of `N` sends `2 (N - 1)` of `1 / N` of the
tensor (Patarasuk and Yuan 2009), so `N - 1` times what two members send for `2 / N` of it; an all-gather sends `N - 1`
whole tensors (Thakur et al. 2005), an all-to-all `N - 1` slices.
"""

import dataclasses
from collections.abc import Sequence

from tfdist.planning.measurements import GATHER, TransferMeasurement


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
    """Seconds of collectives on a machine, without a limit on the link.

    >>> measured = [TransferMeasurement("sum", size, 1e-3 + size * 2e-9, size * 1e-9) for size in (1000, 10**6)]
    >>> costs = TransferCosts(tuple(measured))
    >>> round(costs.core_seconds("sum", 2e6, members=2), 6), round(costs.core_seconds("sum", 2e6, members=4), 6)
    (0.002, 0.003)

    Attributes:
        measured: Collectives of two members.
    """

    measured: tuple[TransferMeasurement, ...]

    def seconds(self, kind: str, nbytes: float, members: int) -> float:
        """Returns the time of a collective alone, from the call to the result."""
        return self._cost(kind, nbytes, members, [(one.nbytes, one.seconds) for one in self._of(kind)])

    def core_seconds(self, kind: str, nbytes: float, members: int) -> float:
        """Returns how long a core of each member is busy with a collective: copies, system calls, sums."""
        return self._cost(kind, nbytes, members, [(one.nbytes, one.core_seconds) for one in self._of(kind)])

    def _of(self, kind: str) -> list[TransferMeasurement]:
        return sorted((one for one in self.measured if one.kind == kind), key=lambda one: one.nbytes)

    @staticmethod
    def _cost(kind: str, nbytes: float, members: int, points: Sequence[tuple[float, float]]) -> float:
        if members == 1:
            return 0.0
        of_two = nbytes if kind == GATHER else 2 * nbytes / members
        return (members - 1) * interpolate(points, of_two)
