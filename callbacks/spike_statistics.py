"""The limits of a loss and a gradient norm, from those of the last steps."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SpikeLimit:
    """From which value on a step has jumped: `max(mean + deviations * standard deviation, factor * mean)`.

    Attributes:
        window: Of how many steps mean and standard deviation are, at most.
        warm_up: How many steps must have been made before there is a limit.
        deviations: A number of standard deviations.
        factor: A multiple of the mean.
    """

    window: int
    warm_up: int
    deviations: float
    factor: float

    def of(self, values: Any) -> float:
        """Returns the limit after steps with these values; infinity before the end of the warm-up.

        Equal values say nothing about deviations. The sums are exact, so that all workers compute the same limit.

        >>> SpikeLimit(window=4, warm_up=2, deviations=2.0, factor=1.5).of([1.0, 3.0])
        4.0
        >>> SpikeLimit(window=4, warm_up=2, deviations=2.0, factor=1.5).of([2.0, 2.0])
        3.0
        """
        if len(values) < self.warm_up:
            return math.inf
        mean = math.fsum(values) / len(values)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        if deviation == 0:
            return self.factor * mean if self.factor > 1 and mean > 0 else math.inf
        return max(mean + self.deviations * deviation, self.factor * mean)


class RunningStatistics:
    """The values of the last steps that count, by name.

    Args:
        limit: Computes limits from them.
    """

    def __init__(self, limit: SpikeLimit) -> None:
        self._limit = limit
        self._values: dict[str, deque[float]] = {}

    def spike_in(self, values: Mapping[str, float]) -> tuple[str, float, float] | None:
        """Returns the name, the value and the limit of the first value that is not finite, or above its limit."""
        for name, value in values.items():
            limit = self._limit.of(self._values.get(name, ()))
            if not math.isfinite(value) or value > limit:
                return name, value, limit
        return None

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the values of a step that counts."""
        for name, value in values.items():
            self._values.setdefault(name, deque(maxlen=self._limit.window)).append(value)

    def state(self) -> dict[str, list[float]]:
        """Returns the values."""
        return {name: list(values) for name, values in self._values.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Continues with the values that `state` has returned."""
        self._values = {name: deque(values, maxlen=self._limit.window) for name, values in state.items()}
