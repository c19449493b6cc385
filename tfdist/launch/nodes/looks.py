"""A clock that goes only while its owner looks."""

# Longer than this between two looks, this process itself did not run: what was said meanwhile has not been heard yet.
_MAX_LOOK_SECONDS = 1.0


class Looks:
    """Seconds in which this process has looked at what arrived: what judges the silence of others.

    A process that was stopped, or held up by a terminal that nobody reads, must not take its own absence for theirs.

    >>> looks = Looks(now=10.0)
    >>> looks.at(10.5), looks.at(70.0)
    (0.5, 1.5)
    """

    def __init__(self, *, now: float) -> None:
        self._now, self._seconds = now, 0.0

    def at(self, now: float) -> float:
        """Returns the seconds so far, at a monotonic time."""
        self._seconds += min(max(now - self._now, 0.0), _MAX_LOOK_SECONDS)
        self._now = now
        return self._seconds
