"""What is known of why an attempt ends, while it runs."""

import time
from collections.abc import Mapping

from tfdist.launch.failure import WorkerEnd, cause
from tfdist.launch.liveness import Liveness
from tfdist.launch.outcome import Outcome
from tfdist.launch.roles import Role
from tfdist.launch.worker_process import WorkerProcess


class Findings:
    """The ends of the workers and the verdicts on them.

    Args:
        number: Which attempt it is, 0 first.
        roles: What each process is, by rank.
    """

    def __init__(self, number: int, roles: Mapping[int, Role]) -> None:
        self._number, self._roles = number, roles
        self._started_at, self._began = time.time(), time.monotonic()
        self._verdicts: dict[int, str] = {}
        self.ends: list[WorkerEnd] = []  # in the order of time
        self.stall = ""
        self.unstarted: tuple[int, OSError] | None = None
        self.stop_signal: int | None = None

    @property
    def frozen(self) -> list[str]:
        """The names of those that are frozen and that the attempt cannot do without."""
        return [self._roles[rank].name for rank in self._verdicts if not self._roles[rank].is_replaced]

    @property
    def is_failing(self) -> bool:
        """Whether anything but a preemption is a reason to end the attempt."""
        first = cause(self.ends)
        return bool(self.stall or self.unstarted or self.frozen) or (first is not None and not first.is_preempted)

    @property
    def is_echo(self) -> bool:
        """Whether all that has failed only tells of a peer that is gone."""
        first = cause(self.ends)
        return first is not None and first.is_echo and not first.is_preempted

    def describe(self) -> str:
        """Returns the first failure so far in one line."""
        first = cause(self.ends)
        return "no cause was found in time" if first is None else f"{first.name}: {first.describe()}"

    def freeze(self, rank: int, reason: str) -> None:
        """Takes note that a worker is frozen, and will be killed for that."""
        self._verdicts[rank] = f"frozen: {reason}"

    def end_of(
        self, worker: WorkerProcess, returncode: int, last_lines: tuple[str, ...], *, are_all_told: bool
    ) -> WorkerEnd:
        """Returns how a worker ended.

        Args:
            worker: It has been reaped.
            returncode: Its exit code, or minus a signal's number.
            last_lines: Its last lines of output.
            are_all_told: Whether all have been told to end.
        """
        role, verdict = self._roles[worker.rank], self._verdicts.get(worker.rank, "")
        if role.is_replaced:
            self._verdicts.pop(worker.rank, None)
        if not role.runs_script and (self._is_through or (role.is_replaced and are_all_told)):
            # Nothing that it does now is a reason for anything.
            return WorkerEnd(worker.rank, returncode, was_told=True, at=time.time(), task=role.name)
        was_told = bool(worker.told) and not verdict
        if role.is_server and not (returncode or was_told or verdict):
            verdict = "exit code 0, while it was needed"
        return WorkerEnd(
            worker.rank,
            returncode,
            last_lines,
            was_told=was_told,
            verdict=verdict,
            at=time.time(),
            task=role.name,
        )

    def outcome(self, ended_at: float | None, liveness: Liveness) -> Outcome:
        """Returns how the attempt ended.

        Args:
            ended_at: Monotonic time in seconds at which the workers were told to end; None: now.
            liveness: What they have told of.
        """
        errors = {
            rank: told
            for rank, told in liveness.errors.items()
            if self._roles[rank].runs_script or not (self._roles[rank].is_replaced or self._is_through)
        }
        failed_at = time.monotonic() if ended_at is None else ended_at
        return Outcome(
            self._number,
            sum(role.task.type == "worker" for role in self._roles.values()),
            tuple(self.ends),
            roles=self._roles,
            started_at=self._started_at,
            failed_at=failed_at,
            seconds=failed_at - self._began,
            stop_signal=self.stop_signal,
            stall=self.stall,
            unstarted=self.unstarted,
            heard=liveness.heard,
            fit=liveness.fit,
            step=liveness.step,
            saved=liveness.saved,
            errors=errors,
        )

    @property
    def _is_through(self) -> bool:
        """Whether a process that runs the script has ended well, by itself."""
        own = [end for end in self.ends if self._roles[end.rank].runs_script and not end.was_told]
        return any(end.returncode == 0 or end.is_preempted for end in own)
