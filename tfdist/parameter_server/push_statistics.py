"""Statistics of each worker: pushes, samples, staleness, bytes, time."""

import dataclasses
import time
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class WorkerStats:
    """What a worker has done since the strategy was created.

    Attributes:
        steps: Pushes.
        samples: Samples in these pushes.
        staleness: Mean number of updates by other workers between pull and push.
        max_staleness: The largest such number.
        bytes_pushed: Payload bytes of gradients, from the worker to the servers.
        bytes_pulled: Payload bytes of variables, from the servers to the worker.
        left_out: Pushes that arrived after their round had ended.
        seconds: Time spent on pushes, by the chief's clock. A push starts when it is scheduled, or when the worker's
            previous push ends if that is later.
        held_up_seconds: How long all other workers had finished a round and waited for this worker alone.
    """

    steps: int = 0
    samples: int = 0
    staleness: float = 0.0
    max_staleness: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    left_out: int = 0
    seconds: float = 0.0
    held_up_seconds: float = 0.0

    def since(self, earlier: "WorkerStats") -> "WorkerStats":
        """The difference to `earlier`; `max_staleness` stays that of all pushes.

        >>> WorkerStats(steps=4, staleness=1.5).since(WorkerStats(steps=2, staleness=1.0)).staleness
        2.0
        """
        steps = self.steps - earlier.steps
        stale = self.staleness * self.steps - earlier.staleness * earlier.steps
        difference = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in dataclasses.fields(self)}
        difference |= {"staleness": stale / steps if steps else 0.0, "max_staleness": self.max_staleness}
        return WorkerStats(**difference)


class StatsCollector:
    """Collects the statistics of all workers on the chief.

    Attributes:
        updates: Number of updates so far: of pushes in asynchronous mode, of rounds in synchronous mode.
    """

    def __init__(self, workers: int) -> None:
        self.updates = 0
        self._stats = [WorkerStats() for _ in range(workers)]
        self._ended_at = [time.monotonic()] * workers

    @property
    def stats(self) -> tuple[WorkerStats, ...]:
        """The statistics of each worker."""
        return tuple(self._stats)

    def add(
        self, report: Mapping[str, int], *, counts: bool = True, scheduled_at: float | None = None, is_last: bool = True
    ) -> None:
        """Adds a push that has just ended.

        `report` is a `gradient_push.push_report`. A push that does not count was not used by its round, and of a phase
        that is not the last of its step only bytes and time count. Times are those of `time.monotonic()`.
        """
        worker, now = report["worker"], time.monotonic()
        before = self._stats[worker]
        began = now if scheduled_at is None else max(scheduled_at, self._ended_at[worker])
        self._ended_at[worker] = now
        steps = before.steps + is_last
        self._stats[worker] = WorkerStats(
            steps,
            before.samples + report["samples"] * is_last,
            before.staleness + (report["staleness"] - before.staleness) / max(1, steps),
            max(before.max_staleness, report["staleness"]),
            before.bytes_pushed + report["bytes_pushed"],
            before.bytes_pulled + report["bytes_pulled"],
            before.left_out + (not counts),
            before.seconds + now - began,
            before.held_up_seconds,
        )

    def add_held_up(self, worker: int, seconds: float) -> None:
        """Adds the time for which all others waited for `worker` at the end of a round."""
        before = self._stats[worker]
        self._stats[worker] = dataclasses.replace(before, held_up_seconds=before.held_up_seconds + seconds)
