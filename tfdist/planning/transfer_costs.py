"""What TensorFlow's collectives cost without a network: by kind and size, from measurements between two processes.

An exchange of more members consists of the same messages: a ring all-reduce of `N` sends `2 (N - 1)` of `1 / N` of the
tensor (Patarasuk and Yuan 2009), so `N - 1` times what two members send for `2 / N` of it; an all-gather sends `N - 1`
whole tensors (Thakur et al. 2005), an all-to-all `N - 1` slices. What a call costs beside its messages counts once. Two
members show it: their all-reduce sends two messages of half a tensor, an all-gather of half a tensor sends one.
"""

import dataclasses
from collections.abc import Sequence

from tfdist.planning.measurements import GATHER, SUM, TransferMeasurement

SHORT_BYTES = 64 * 2**10  # two members gather shorter tensors and add them themselves


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
        return self._cost(kind, nbytes, members, "seconds")

    def core_seconds(self, kind: str, nbytes: float, members: int) -> float:
        """Returns how long a core of each member is busy with a collective: copies, system calls, sums."""
        return self._cost(kind, nbytes, members, "core_seconds")

    def once(self, name: str) -> float:
        """Returns what a call costs beside its messages: the field `name` of measurements, without them.

        >>> ring, gather = TransferMeasurement("sum", 10**6, 8.0, 0.0), TransferMeasurement("gather", 500_000, 5.0, 0.0)
        >>> TransferCosts((ring, gather)).once("seconds")  # a message takes 3 s
        2.0
        """
        gathers, sums = self._points(GATHER, name), self._rings(name)
        if not gathers or not sums:
            return 0.0
        nbytes, seconds = sums[0]
        least = min(getattr(one, name) for one in self.measured)
        return min(max(2 * interpolate(gathers, nbytes / 2) - seconds, 0.0), least)

    def _rings(self, name: str) -> list[tuple[float, float]]:
        return [point for point in self._points(SUM, name) if point[0] > SHORT_BYTES]

    def _points(self, kind: str, name: str) -> list[tuple[float, float]]:
        return sorted((float(one.nbytes), getattr(one, name)) for one in self.measured if one.kind == kind)

    def _cost(self, kind: str, nbytes: float, members: int, name: str) -> float:
        if members == 1:
            return 0.0
        of_two = nbytes if kind == GATHER else 2 * nbytes / members
        two = interpolate(self._points(kind, name), of_two)
        if members == 2:
            return two
        once = self.once(name)
        messages = max(two - once, 0.0)
        rings, gathers = self._rings(name), self._points(GATHER, name)
        if kind == SUM and gathers and (not rings or of_two < rings[0][0]):  # two members gather these
            messages = 2 * max(interpolate(gathers, of_two / 2) - once, 0.0)
        return once + (members - 1) * messages
