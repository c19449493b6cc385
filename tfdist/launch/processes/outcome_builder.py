"""Collects how the workers of this host exited, and builds the outcome of their attempt."""

import time
from collections.abc import Mapping

from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor
from tfdist.launch.processes.worker_process import WorkerProcess
from tfdist.launch.restart.attempt_outcome import Outcome, has_completed
from tfdist.launch.restart.worker_exit import WorkerExit, root_cause
from tfdist.launch.run_spec import Role, count_workers


class OutcomeBuilder:
    """Collects how the workers exited and why the launcher judged them failed, and builds the outcome of an attempt."""

    def __init__(self, attempt: int, roles: Mapping[int, Role]) -> None:
        self._attempt, self._roles = attempt, roles
        self._started_at, self._began = time.time(), time.monotonic()
        self._failure_reasons: dict[int, str] = {}
        self.exits: list[WorkerExit] = []  # in order of time
        self.stall = ""
        self.too_few = ""
        self.start_failure: tuple[int, OSError] | None = None
        self.stop_signal: int | None = None

    @property
    def frozen(self) -> list[str]:
        """Names of the frozen workers that the attempt cannot continue without."""
        return [self._roles[rank].name for rank in self._failure_reasons if not self._roles[rank].is_restarted_alone]

    @property
    def is_failing(self) -> bool:
        """Whether the attempt has failed so far. A preemption is not a failure."""
        cause = root_cause(self.exits)
        has_failed_worker = cause is not None and not cause.is_preempted
        return bool(self.stall or self.start_failure or self.frozen) or has_failed_worker

    @property
    def is_preempted(self) -> bool:
        """Whether the only failures so far are preemptions."""
        cause = root_cause(self.exits)
        return cause is not None and cause.is_preempted

    @property
    def reports_lost_peer(self) -> bool:
        """Whether all failures so far only report a lost peer."""
        cause = root_cause(self.exits)
        return cause is not None and cause.reports_lost_peer and not cause.is_preempted

    def describe(self) -> str:
        """Returns the first failure so far in one line."""
        cause = root_cause(self.exits)
        return "no cause was found in time" if cause is None else f"{cause.name}: {cause.describe()}"

    def record_frozen(self, rank: int, reason: str) -> None:
        self._failure_reasons[rank] = f"frozen: {reason}"

    def worker_exit(
        self, worker: WorkerProcess, returncode: int, last_lines: tuple[str, ...], *, all_signalled: bool
    ) -> WorkerExit:
        """Returns how a worker exited. `all_signalled` says whether all processes have been signalled to exit."""
        role, reason = self._roles[worker.rank], self._failure_reasons.get(worker.rank, "")
        if role.is_restarted_alone:
            self._failure_reasons.pop(worker.rank, None)
        if not role.runs_script and (
            has_completed(self.exits, self._roles) or (role.is_restarted_alone and all_signalled)
        ):
            # Nobody needs it any more, however it exits.
            return WorkerExit(worker.rank, returncode, was_signalled=True, at=time.time(), task=role.name)
        was_signalled = bool(worker.signals_sent) and not reason
        if role.is_server and not (returncode or was_signalled or reason):
            reason = "exit code 0, while it was needed"
        return WorkerExit(
            worker.rank,
            returncode,
            last_lines,
            was_signalled=was_signalled,
            failure_reason=reason,
            at=time.time(),
            task=role.name,
        )

    def build(self, shutdown_began_at: float | None, monitor: HeartbeatMonitor) -> Outcome:
        errors = {
            rank: error
            for rank, error in monitor.errors.items()
            if self._roles[rank].runs_script
            or not (self._roles[rank].is_restarted_alone or has_completed(self.exits, self._roles))
        }
        failed_at = time.monotonic() if shutdown_began_at is None else shutdown_began_at
        return Outcome(
            self._attempt,
            count_workers(self._roles),
            tuple(self.exits),
            roles=self._roles,
            started_at=self._started_at,
            failed_at=failed_at,
            seconds=failed_at - self._began,
            stop_signal=self.stop_signal,
            stall=self.stall,
            too_few=self.too_few,
            left_out=frozenset(rank for rank, role in self._roles.items() if role.is_elastic)
            - {worker.rank for worker in self.exits},
            start_failure=self.start_failure,
            heartbeat_ranks=monitor.heartbeat_ranks,
            fit=monitor.fit,
            step=monitor.step,
            saved=monitor.saved,
            errors=errors,
        )
