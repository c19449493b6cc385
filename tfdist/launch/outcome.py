"""How an attempt ended: one start of all workers, until the last of them is gone."""

import dataclasses
from collections.abc import Mapping

from tfdist.launch.failure import WorkerEnd, cause
from tfdist.launch.roles import Role


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Args:
        attempt: Its number, 0 first.
        workers: How many workers it had.
        ends: How they ended, in the order in which they did.
        roles: What each process was, by rank; empty: all of them workers that run the script.
        started_at: Seconds since 1970.
        failed_at: Monotonic time in seconds at which the workers were told to end, or had ended.
        seconds: From the start to `failed_at`.
        stop_signal: The signal that told this command to end, or None.
        stall: Why the training stood still, or an empty string.
        lost: Which host was lost, and why, or an empty string.
        unstarted: The rank that could not be started, and why, or None.
        heard: The ranks that sent heartbeats.
        fit: Which `fit` of the script ran, 1 first.
        step: The highest step of any worker in it, or None.
        saved: The highest sequence number of a checkpoint of it, or None.
        errors: The exceptions that workers told of, by rank: `type` and `message`.
    """

    attempt: int
    workers: int
    ends: tuple[WorkerEnd, ...]
    roles: Mapping[int, Role] = dataclasses.field(default_factory=dict)
    started_at: float = 0.0
    failed_at: float = 0.0
    seconds: float = 0.0
    stop_signal: int | None = None
    stall: str = ""
    lost: str = ""
    unstarted: tuple[int, OSError] | None = None
    heard: frozenset[int] = frozenset()
    fit: int = 1
    step: int | None = None
    saved: int | None = None
    errors: Mapping[int, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def cause(self) -> WorkerEnd | None:
        """The worker that failed first, or None where no single one did."""
        if self.stall or self.lost or self.unstarted or self.stop_signal is not None:
            return None
        # Who told of an exception may have printed nothing before it had to be ended.
        return cause(self.ends) or next((end for end in self.ends if end.rank in self.errors and end.was_told), None)

    @property
    def failed_rank(self) -> int | None:
        """The rank of the worker that failed first or could not be started, or None."""
        if self.unstarted is not None:
            return self.unstarted[0]
        return None if self.cause is None else self.cause.rank

    @property
    def is_preempted(self) -> bool:
        """Whether all saved and left because they were told to; some may have been through already.

        >>> Outcome(0, 2, (WorkerEnd(0, 75), WorkerEnd(1, 0))).is_preempted
        True
        >>> Outcome(0, 2, (WorkerEnd(0, 75), WorkerEnd(1, 1))).is_preempted
        False
        """
        ends = [end for end in self.ends if self.runs_script(end.rank)]
        others_failed = any(end.failed for end in self.ends if not self.runs_script(end.rank))
        expected = sum(role.runs_script for role in self.roles.values()) if self.roles else self.workers
        return (
            any(end.is_preempted for end in ends)
            and all(end.is_preempted or end.returncode == 0 for end in ends)
            and len(ends) == expected
            and (self.stop_signal is not None or not others_failed)
        )

    def task(self, rank: int) -> str:
        """What users are told, for example "worker 0" or "ps 0"."""
        return self.roles[rank].name if self.roles else f"worker {rank}"

    def runs_script(self, rank: int) -> bool:
        """Whether a process ran the user's script."""
        return not self.roles or self.roles[rank].runs_script

    @property
    def has_failed(self) -> bool:
        """Whether anything but success ended it, a signal to this command aside."""
        return self.stop_signal is None and bool(self.stall or self.lost or self.unstarted or self.cause)

    @property
    def exit_code(self) -> int:
        """The exit code of a run that ends with this attempt, unless all workers were preempted."""
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        if not self.has_failed:
            return 0
        # A worker that was told to end before it ended by itself had still raised an error of its own.
        return (
            1 if self.cause is None or (self.cause.was_told and not self.cause.verdict) else self.cause.exit_code or 1
        )

    def describe(self) -> str:
        """Returns the cause in one line.

        >>> Outcome(0, 1, (WorkerEnd(0, 3),)).describe()
        'worker 0: exit code 3'
        """
        if self.stall or self.lost:
            return self.stall or self.lost
        if self.unstarted is not None:
            rank, error = self.unstarted
            return f"{self.task(rank)} could not be started: {error}"
        return "no failure" if self.cause is None else f"{self.cause.name}: {self.cause.describe()}"

    def report(self) -> list[str]:
        """Returns the lines that tell the user of the failure, the cause last."""
        first = self.cause
        others = [f"{end.name} ended after that: {end.describe()}" for end in self.ends if end != first]
        return [*others, *(first.report() if first is not None else [f"the attempt failed: {self.describe()}"])]
