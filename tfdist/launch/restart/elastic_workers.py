"""The workers of an elastic attempt: how many train, whether one is restarted, and which losses may be the cause."""

import dataclasses
import signal
from collections.abc import Collection, Iterable

from tfdist.launch.restart.restart_policy import LONG_LIFE_SECONDS
from tfdist.launch.restart.worker_exit import WorkerExit
from tfdist.utils.formatting import counted

# Heartbeats that a worker sent before another one exited have arrived after this time.
_LATE_HEARTBEATS_SECONDS = 1.0


@dataclasses.dataclass
class _Loss:
    exit: WorkerExit
    at: float
    progress: tuple[int, int] | None = None  # of the others, once their late heartbeats have arrived


@dataclasses.dataclass
class _ElasticWorker:
    starts: int = 0
    started_at: float = 0.0
    is_running: bool = False
    has_trained: bool = False  # its present process
    is_wanted: bool = True  # whether it is to train, or was asked to leave
    is_leaving: bool = False  # whether its present process was asked to leave
    joins: bool = False  # whether others trained when its present process was started
    loss: _Loss | None = None  # the last one, unless the others have made a step since

    @property
    def is_waiting(self) -> bool:
        return self.starts > 1 and not self.has_trained


class ElasticWorkers:
    """Counts the workers that train, and keeps the losses that the others may still fail of. Times are monotonic.

    A process that replaces a lost worker trains from its first step on, or from 60 s after its start if it does not
    report steps. So workers that fail one after the other, before any of them has made a step, are not started again
    indefinitely. A loss after which the others have made a step did not cause a later failure.

    Args:
        ranks: The workers of this host; none: the attempt is not elastic.
        least: The least number of workers of this host that train.
        late: Those of them that join others, also when they start for the first time.
        unwanted: Those that are not to train before `resize` says so.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        least: int,
        late: Collection[int] = (),
        unwanted: Collection[int] = (),
    ) -> None:
        self._workers = {
            rank: _ElasticWorker(starts=int(rank in late), is_wanted=rank not in unwanted) for rank in ranks
        }
        self._late = frozenset(late)
        self._has_begun = False  # whether a worker of this host has made a step
        self._least = least
        self._completed_at: float | None = None
        self._has_failed = False  # whether too few workers are left

    @property
    def is_complete(self) -> bool:
        """Whether a worker has ended with 0."""
        return self._completed_at is not None

    @property
    def may_restart(self) -> bool:
        """Whether a worker that is lost is started again."""
        return not self.is_complete and not self._has_failed

    def record_start(self, rank: int, *, now: float) -> None:
        """Records that a worker was started. Ranks of other processes are ignored."""
        worker = self._workers.get(rank)
        if worker is not None:
            worker.joins = self._has_begun or rank in self._late
            worker.starts += 1
            worker.started_at, worker.is_running, worker.has_trained, worker.is_leaving = now, True, False, False

    def observe(self, trained_ranks: Collection[int], progress: tuple[int, int], *, now: float) -> list[int]:
        """Takes the state of the training; returns the workers that have joined the others since the last call.

        Args:
            trained_ranks: The workers whose present process has made a step.
            progress: Number of the `fit` and its last step, of any worker; -1 before it.
            now: The time.
        """
        joined = []
        self._has_begun |= progress[1] >= 0
        for rank, worker in self._workers.items():
            trains = worker.is_running and rank in trained_ranks
            if trains and worker.is_waiting and worker.joins:
                joined.append(rank)
            worker.has_trained = trains
            loss = worker.loss
            if loss is None or now - loss.at < _LATE_HEARTBEATS_SECONDS:
                continue
            if loss.progress is None:
                loss.progress = progress
            elif progress > loss.progress:
                worker.loss = None
        return joined

    def record_exit(self, ended: WorkerExit, *, now: float) -> bool:
        """Records that a worker was lost, or could not be started; returns whether enough workers are left."""
        worker = self._workers[ended.rank]
        if self._trains(worker, now):  # else the others have lost nothing
            worker.loss = _Loss(ended, now)
        worker.is_running = False
        self._has_failed = self.count(now=now) < self._least
        return not self._has_failed

    def is_wanted(self, rank: int) -> bool:
        """Whether a worker is to train."""
        return self._workers[rank].is_wanted

    def is_leaving(self, rank: int) -> bool:
        """Whether the present process of a worker was asked to leave, also if the worker is wanted again."""
        return self._workers[rank].is_leaving

    @property
    def wanted_count(self) -> int:
        """Number of workers that are to train."""
        return sum(worker.is_wanted for worker in self._workers.values())

    def resize(self, count: int, *, now: float) -> tuple[list[int], list[int]]:
        """Makes another number of workers those that are to train; returns who starts, and who leaves.

        Those leave first that do not train, then those of the highest ranks. Those that are still leaving start last.
        """
        wanted = [rank for rank, worker in self._workers.items() if worker.is_wanted]
        if count >= len(wanted):
            others = sorted(self._workers.keys() - set(wanted), key=lambda rank: (self._workers[rank].is_running, rank))
            chosen = others[: count - len(wanted)]
        else:
            last = sorted(wanted, key=lambda rank: (self._trains(self._workers[rank], now), -rank))
            chosen = last[: len(wanted) - count]
        for rank in chosen:
            worker = self._workers[rank]
            worker.is_wanted = not worker.is_wanted
            worker.is_leaving |= worker.is_running and not worker.is_wanted
        return (chosen, []) if count >= len(wanted) else ([], chosen)

    def fail(self) -> None:
        """Records that too few workers of all hosts are left."""
        self._has_failed = True

    def record_completion(self, *, now: float) -> None:
        """Records that a worker has ended with 0."""
        self._completed_at = now if self._completed_at is None else self._completed_at

    def signal_to_waiting(self, grace_seconds: float, *, now: float) -> int | None:
        """Returns the signal that ends the workers that wait to join, once a worker has ended with 0, or None."""
        if self._completed_at is None or now < self._completed_at + grace_seconds:
            return None
        return signal.SIGTERM if now < self._completed_at + 2 * grace_seconds else signal.SIGKILL

    def count(self, *, now: float) -> int:
        """Returns the number of workers that train."""
        return sum(self._trains(worker, now) for worker in self._workers.values())

    def is_waiting(self, rank: int) -> bool:
        """Whether a worker that was started again has not trained yet."""
        return self._workers[rank].is_waiting

    @property
    def recent_exits(self) -> list[WorkerExit]:
        """The exits of which the attempt may have failed, in order of time."""
        losses = [worker.loss for worker in self._workers.values() if worker.loss is not None]
        return [loss.exit for loss in sorted(losses, key=lambda loss: loss.at)]

    def _trains(self, worker: _ElasticWorker, now: float) -> bool:
        return worker.is_running and (not worker.is_waiting or now - worker.started_at >= LONG_LIFE_SECONDS)


def describe_too_few(count: int, least: int) -> str:
    """Returns how many workers train, where that is too few.

    >>> describe_too_few(1, 2)
    '1 worker left of at least 2 (--elastic)'
    """
    return f"{counted(count, 'worker')} left of at least {least} (--elastic)"
