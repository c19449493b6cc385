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
    """

    steps: int = 0
    samples: int = 0
    staleness: float = 0.0
    max_staleness: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    left_out: int = 0


class Tally:
    """Counts by worker."""

    def __init__(self, workers: int) -> None:
        """Begins with nothing, now."""
        self._counts = [WorkerCount() for _ in range(workers)]
        self.started_at = time.monotonic()

    @property
    def counts(self) -> tuple[WorkerCount, ...]:
        """Of each worker."""
        return tuple(self._counts)

    def add(self, facts: Mapping[str, int], *, counts: bool = True) -> None:
        """Takes what a worker told of a push; `counts`: whether its round took it."""
        worker = facts["worker"]
        before = self._counts[worker]
        steps = before.steps + 1
        self._counts[worker] = WorkerCount(
            steps,
            before.samples + facts["samples"],
            before.staleness + (facts["staleness"] - before.staleness) / steps,
            max(before.max_staleness, facts["staleness"]),
            before.bytes_pushed + facts["bytes_pushed"],
            before.bytes_pulled + facts["bytes_pulled"],
            before.left_out + (not counts),
        )
