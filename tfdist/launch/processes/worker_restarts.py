"""Workers beside parameter servers, which are restarted one by one while the training continues."""

import dataclasses
import time
from collections.abc import Callable

from tfdist.launch.processes.run_policy import RunPolicy
from tfdist.launch.restart.restart_policy import WorkerBackoff
from tfdist.launch.restart.worker_exit import WorkerExit


class WorkerRestarts:
    """Says what follows the exits of such workers, and notices when none is left on any host.

    Args:
        backoff: When these workers are due.
        policy: Knows whether other hosts have workers.
        say: Shows lines to the user.
    """

    def __init__(self, backoff: WorkerBackoff, *, policy: RunPolicy, say: Callable[..., None]) -> None:
        self._backoff, self._policy, self._say = backoff, policy, say
        self._last: WorkerExit | None = None  # the exit after which this host has no worker any more

    @property
    def is_pending(self) -> bool:
        """Whether a worker waits for its restart."""
        return self._backoff.is_pending

    def record_start(self, rank: int) -> None:
        """Records that a process was started. Other processes than such workers are ignored."""
        self._backoff.record_start(rank, now=time.monotonic())

    def record_exit(self, ended: WorkerExit) -> None:
        """Records that such a worker exited or could not be started."""
        has_others = self._policy.has_other_workers
        follows = self._backoff.record_exit(ended.rank, now=time.monotonic(), has_others=has_others)
        self._say(f"{ended.name} {'failed' if ended.failed else 'ended'}: {ended.describe()}; {follows}")
        if self._backoff.is_exhausted:
            self._last = ended
            self._policy.report_no_worker()

    def due(self) -> list[int]:
        """Returns the workers to restart now."""
        return self._backoff.due(now=time.monotonic())

    def take_failure(self) -> WorkerExit | None:
        """Returns, once, the exit after which no worker is left on any host; None while there are some."""
        if self._last is None or self._policy.has_other_workers:
            return None
        last, self._last = self._last, None
        reason = f"{last.describe()}; {self._backoff.none_left}"
        return dataclasses.replace(last, failure_reason=reason, was_signalled=False)
