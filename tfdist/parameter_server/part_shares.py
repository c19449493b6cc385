"""Parts of a round whose sizes follow the measured speeds of the workers."""

from collections.abc import Mapping

import numpy as np

from tfdist.load_balancing.load_balancing_options import LoadBalancing
from tfdist.load_balancing.share_planning import (
    SHARE,
    after_step,
    initial_state,
    row_bounds,
    whole_shares,
    within_limits,
)

# Each size of a part is a trace of the step, which stays: 16 units make at most 16 of them.
_UNITS = 16


class PartShares:
    """The shares of the workers of a synchronous mode. The chief alone measures and divides."""

    def __init__(self, workers: int, options: LoadBalancing | None) -> None:
        """Begins with equal parts, or those next to them that keep the limits of `options`.

        Args:
            workers: The number of workers.
            options: How parts follow the speeds; `None` if they stay equal.
        """
        self._devices, self._options = [1] * workers, options
        limits = [1.0] * workers if options is None else options.limits(workers)
        self._state = initial_state(whole_shares(within_limits(self._devices, limits)))

    @property
    def follows_speeds(self) -> bool:
        """Whether parts follow the measured speeds."""
        return self._options is not None

    @property
    def shares(self) -> tuple[float, ...]:
        """The present share of each worker, as a fraction."""
        return tuple((self._state[SHARE] / self._state[SHARE].sum()).tolist())

    def sizes(self, rows: int) -> list[int]:
        """Returns how many rows of a batch each worker computes.

        >>> PartShares(2, LoadBalancing()).sizes(7)
        [4, 3]
        """
        bounds = row_bounds(self._state[SHARE].astype(int).tolist(), rows)
        return [end - start for start, end in zip(bounds, bounds[1:], strict=False)]

    def add_round(self, interval: float, measured: Mapping[int, tuple[float, int]]) -> None:
        """Adds a round that has ended, and divides again if it is time.

        Args:
            interval: The seconds from when its parts were scheduled until the last part was done.
            measured: By worker, the seconds and the rows of its part. Workers are missing whose part another one has
                computed.
        """
        of_workers = [measured.get(worker, (0.0, 0)) for worker in range(len(self._devices))]
        seconds, rows = np.asarray(of_workers, np.float64).T
        self._state = after_step(self._state, seconds, rows, interval, self._devices, self._options, units=_UNITS)
