"""A clock that excludes the time in which this process was suspended."""

# A longer gap between two readings means that this process did not run: messages of that time are still unread.
_MAX_GAP_SECONDS = 1.0


class ActiveClock:
    """Counts the seconds in which this process was able to read messages; the silence of others is measured by it.

    A process that was stopped, or blocked by a terminal, must not take its own absence for the absence of others. Of a
    gap between two readings, of a monotonic time `now`, at most `max_gap_seconds` count.

    >>> clock = ActiveClock(now=10.0)
    >>> clock.advance(10.5), clock.advance(70.0)
    (0.5, 1.5)
    """

    def __init__(self, *, now: float, max_gap_seconds: float = _MAX_GAP_SECONDS) -> None:
        self._now, self._seconds, self._max_gap_seconds = now, 0.0, max_gap_seconds

    def advance(self, now: float) -> float:
        """Returns the active seconds until `now`."""
        self._seconds += min(max(now - self._now, 0.0), self._max_gap_seconds)
        self._now = now
        return self._seconds
