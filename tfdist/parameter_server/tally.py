"""What each worker has done."""

import dataclasses
import time
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class WorkerCount:
    """What a worker has done in this training.

    Attributes:
      steps: pushes.
      samples: samples of these.
      staleness: mean number of updates by others between pull and push.
      max_staleness: the largest.
      bytes_pushed: payload bytes of gradients, from the worker to the servers.
      bytes_pulled: payload bytes of variables, from the servers to the worker.
      left_out: pushes that came too late for their round.
      seconds: at work, by the chief's clock: from when a push was scheduled, or the worker's last one had ended, until
        it ended.
      held_up_seconds: how long all others had finished a round and waited for this worker alone.
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

    def since(self, earlier: "WorkerCount") -> "WorkerCount":
        """What was done after `earlier`; the largest staleness is that of all.

        >>> WorkerCount(steps=4, staleness=1.5).since(WorkerCount(steps=2, staleness=1.0)).staleness
        2.0
        """
        steps = self.steps - earlier.steps
        stale = self.staleness * self.steps - earlier.staleness * earlier.steps
        return WorkerCount(
            steps,
            self.samples - earlier.samples,
            stale / steps if steps else 0.0,
            self.max_staleness,
            self.bytes_pushed - earlier.bytes_pushed,
            self.bytes_pulled - earlier.bytes_pulled,
            self.left_out - earlier.left_out,
            self.seconds - earlier.seconds,
            self.held_up_seconds - earlier.held_up_seconds,
        )


class Tally:
    """Counts by worker."""

    def __init__(self, workers: int) -> None:
        """Begins with nothing, now."""
        self._counts = [WorkerCount() for _ in range(workers)]
        self.started_at = time.monotonic()
        self._ended_at = [self.started_at] * workers

    @property
    def counts(self) -> tuple[WorkerCount, ...]:
        """Of each worker."""
        return tuple(self._counts)

    def add(self, facts: Mapping[str, int], *, counts: bool = True, scheduled_at: float | None = None) -> None:
        """Takes what a worker has just told of a push.

        Args:
          facts: what it told.
          counts: whether its round took it.
          scheduled_at: when it was scheduled, by `time.monotonic()`.
        """
        worker, now = facts["worker"], time.monotonic()
        before = self._counts[worker]
        began = now if scheduled_at is None else max(scheduled_at, self._ended_at[worker])
        self._ended_at[worker] = now
        steps = before.steps + 1
        self._counts[worker] = WorkerCount(
            steps,
            before.samples + facts["samples"],
            before.staleness + (facts["staleness"] - before.staleness) / steps,
            max(before.max_staleness, facts["staleness"]),
            before.bytes_pushed + facts["bytes_pushed"],
            before.bytes_pulled + facts["bytes_pulled"],
            before.left_out + (not counts),
            before.seconds + now - began,
            before.held_up_seconds,
        )

    def add_held_up(self, worker: int, seconds: float) -> None:
        """Takes how long all others waited for `worker` at the end of a round."""
        before = self._counts[worker]
        self._counts[worker] = dataclasses.replace(before, held_up_seconds=before.held_up_seconds + seconds)
