"""When a worker beside parameter servers is restarted, while the chief and the servers continue."""

import dataclasses
from collections.abc import Iterable

FIRST_DELAY_SECONDS = 1.0
MAX_DELAY_SECONDS = 30.0
# A worker that ran for this long did not exit because of how it was started: the delay starts over.
_LONG_LIFE_SECONDS = 60.0


@dataclasses.dataclass
class _WorkerState:
    started_at: float = 0.0
    delay: float = 0.0
    restarts_left: int | None = None  # None: no limit
    due_at: float | None = None
    has_exited: bool = False


class WorkerBackoff:
    """The restart times of workers that are restarted one by one. Times are monotonic, in seconds.

    A worker is restarted after 1 s. The delay doubles, up to 30 s, each time the worker ran for less than 60 s.

    Args:
        ranks: The workers.
        limit: Maximum number of restarts of each worker; None: no limit.

    >>> backoff = WorkerBackoff([1, 2], limit=None)
    >>> backoff.record_start(1, now=0.0)
    >>> backoff.record_exit(1, now=5.0)
    'training continues without it; restart in 1 s'
    >>> backoff.due(now=5.9), backoff.due(now=6.0)
    ([], [1])
    """

    def __init__(self, ranks: Iterable[int], *, limit: int | None) -> None:
        self._limit = limit
        self._workers = {rank: _WorkerState(restarts_left=limit) for rank in ranks}

    @property
    def is_pending(self) -> bool:
        """Whether a worker waits for its restart."""
        return any(worker.due_at is not None for worker in self._workers.values())

    @property
    def is_exhausted(self) -> bool:
        """Whether no worker runs or will be restarted."""
        workers = self._workers.values()
        return bool(workers) and all(worker.has_exited and worker.due_at is None for worker in workers)

    def record_start(self, rank: int, *, now: float) -> None:
        """Records that a worker was started. Ranks of other processes are ignored."""
        worker = self._workers.get(rank)
        if worker is not None:
            worker.started_at, worker.due_at, worker.has_exited = now, None, False

    def record_exit(self, rank: int, *, now: float) -> str:
        """Records that a worker exited or could not be started.

        Returns:
            What follows, for the user.
        """
        worker = self._workers[rank]
        worker.has_exited, worker.due_at = True, None
        if worker.restarts_left == 0:
            limit = f"--worker-restarts {self._limit}"
            return f"no worker is left ({limit})" if self.is_exhausted else f"not restarted ({limit})"
        if worker.restarts_left is not None:
            worker.restarts_left -= 1
        is_young = now - worker.started_at < _LONG_LIFE_SECONDS
        worker.delay = min(2 * worker.delay, MAX_DELAY_SECONDS) if worker.delay and is_young else FIRST_DELAY_SECONDS
        worker.due_at = now + worker.delay
        is_last = all(other.has_exited for other in self._workers.values())
        meanwhile = "training waits for it" if is_last else "training continues without it"
        return f"{meanwhile}; restart in {worker.delay:g} s"

    def due(self, *, now: float) -> list[int]:
        """Returns the workers to restart now."""
        return [rank for rank, worker in self._workers.items() if worker.due_at is not None and now >= worker.due_at]
