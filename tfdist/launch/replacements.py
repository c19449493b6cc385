"""When a worker that ended alone is started again, while the chief and the parameter servers go on."""

import dataclasses
from collections.abc import Iterable

FIRST_DELAY_SECONDS = 1.0
MAX_DELAY_SECONDS = 30.0
# Who lived for that long did not end because of how it was started.
_LONG_LIFE_SECONDS = 60.0


@dataclasses.dataclass
class _Place:
    started_at: float = 0.0
    delay: float = 0.0
    starts_left: int | None = None  # None: no limit
    due_at: float | None = None
    is_empty: bool = False


class Replacements:
    """The places of workers that are started again one by one. Times are monotonic, in seconds.

    A worker is started again after 1 s, and after twice the time before, up to 30 s, where it lived for less than 60 s.

    Args:
        ranks: The workers.
        limit: How often each is started again; None: always.

    >>> replacements = Replacements([1, 2], limit=None)
    >>> replacements.note_start(1, now=0.0)
    >>> replacements.after_end(1, now=5.0)
    'the training goes on without it; started again in 1 s'
    >>> replacements.due(now=5.9), replacements.due(now=6.0)
    ([], [1])
    """

    def __init__(self, ranks: Iterable[int], *, limit: int | None) -> None:
        self._limit = limit
        self._places = {rank: _Place(starts_left=limit) for rank in ranks}

    @property
    def is_pending(self) -> bool:
        """Whether a worker waits to be started again."""
        return any(place.due_at is not None for place in self._places.values())

    @property
    def are_used_up(self) -> bool:
        """Whether all workers are gone for good."""
        return bool(self._places) and all(place.is_empty and place.due_at is None for place in self._places.values())

    def note_start(self, rank: int, *, now: float) -> None:
        """Takes note that a worker was started."""
        place = self._places.get(rank)
        if place is not None:
            place.started_at, place.due_at, place.is_empty = now, None, False

    def after_end(self, rank: int, *, now: float) -> str:
        """Takes note that a worker has ended, or could not be started, and returns what follows, for the user."""
        place = self._places[rank]
        place.is_empty, place.due_at = True, None
        if place.starts_left == 0:
            limit = f"--worker-restarts {self._limit}"
            return f"no worker is left ({limit})" if self.are_used_up else f"not started again ({limit})"
        if place.starts_left is not None:
            place.starts_left -= 1
        is_young = now - place.started_at < _LONG_LIFE_SECONDS
        place.delay = min(2 * place.delay, MAX_DELAY_SECONDS) if place.delay and is_young else FIRST_DELAY_SECONDS
        place.due_at = now + place.delay
        is_last = all(other.is_empty for other in self._places.values())
        goes_on = "the training waits for it" if is_last else "the training goes on without it"
        return f"{goes_on}; started again in {place.delay:g} s"

    def due(self, *, now: float) -> list[int]:
        """Returns the workers whose time to be started again has come."""
        return [rank for rank, place in self._places.items() if place.due_at is not None and now >= place.due_at]
