"""The status of a run: one line for a terminal, and messages for a log."""

from collections.abc import Mapping

from tfdist.launch.process_roles import Role, count_workers, describe_jobs
from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor
from tfdist.launch.restart.attempt_outcome import fit_suffix
from tfdist.utils.formatting import counted, format_duration

_CHECKPOINT_MESSAGE_SECONDS = 10.0  # minimum time between two messages about checkpoints


class RunStatus:
    """Describes the run from the workers' heartbeats. All times are monotonic, in seconds.

    `FailureRecovery` reports steps and checkpoints; without it only the workers are shown.

    >>> from tfdist.launch.process_roles import worker_roles
    >>> roles = worker_roles(2)
    >>> monitor = HeartbeatMonitor(roles, now=0.0, heartbeat_timeout_seconds=10.0, stall_timeout_seconds=0.0)
    >>> status = RunStatus(2)
    >>> status.begin_attempt(1, roles, monitor, now=0.0)
    >>> monitor.receive(0, b'{"step": 1230, "saved": 5, "saved_step": 1200}', now=1.0)
    >>> status.new_messages(now=1.0)
    ['training resumes after step 1,230 with 2 workers (restart 1)', 'checkpoint saved at step 1,200']
    >>> status.line(now=13.0)
    'tfdist: 2 workers · step 1,230 · 1 restart · checkpoint 1,200, 12 s ago'
    """

    def __init__(self, workers: int) -> None:
        self._all_workers = workers
        self._attempt = 0
        self._jobs = ""
        self._monitor: HeartbeatMonitor | None = None
        self._began_at = 0.0
        self._has_announced_start = False
        self._announced_jobs = ""
        # The `fit` and the sequence number of the newest checkpoint of all attempts.
        self._saved: tuple[int, int] | None = None
        self._saves: dict[int, int] = {}  # the highest number of each `fit`; an attempt may skip calls
        self._saved_step: int | None = None
        self._saved_at = 0.0
        self._announced_saved: tuple[int, int] | None = None
        self._announced_saved_at = -_CHECKPOINT_MESSAGE_SECONDS

    def begin_attempt(self, attempt: int, roles: Mapping[int, Role], monitor: HeartbeatMonitor, *, now: float) -> None:
        """Records that an attempt begins.

        The roles are those of all hosts, the heartbeats those of this host's processes.
        """
        workers = count_workers(roles)
        self._jobs = describe_jobs(roles.values())
        if workers < self._all_workers and len(roles) == workers:
            self._jobs = f"{workers} of {self._all_workers} workers"
        self._attempt, self._monitor, self._began_at = attempt, monitor, now
        self._has_announced_start = False

    def line(self, *, now: float) -> str:
        """Returns the status in one line, the most important part first."""
        self._record_saves(now)
        fit, step = (1, None) if self._monitor is None else (self._monitor.fit, self._monitor.step)
        phase = None if self._monitor is None else self._monitor.phase
        parts = [self._jobs]
        if step is None:
            parts.append(f"running for {format_duration(now - self._began_at)}")
        else:
            parts.append(f"step {step:,}{fit_suffix(fit)}")
        if phase is not None:
            parts.append(phase)
        if self._attempt:
            parts.append(counted(self._attempt, "restart"))
        if self._saved is not None and self._saved_step is not None and self._saved[0] >= fit:
            checkpoint = f"checkpoint {self._saved_step:,}{fit_suffix(self._saved[0])}"
            parts.append(f"{checkpoint}, {format_duration(now - self._saved_at)} ago")
        return "tfdist: " + " · ".join(parts)

    def new_messages(self, *, now: float, is_over: bool = False) -> list[str]:
        """Returns messages about what has changed since the last call. Frequent checkpoints are reported less often.

        When the attempt `is_over`, all messages are due.
        """
        self._record_saves(now)
        messages = []
        step = None if self._monitor is None else self._monitor.step
        if self._monitor is not None and step is not None and not self._has_announced_start:
            self._has_announced_start = True
            messages.append(self._start_message(step, self._monitor.fit))
            self._announced_jobs = self._jobs
        is_due = is_over or now - self._announced_saved_at >= _CHECKPOINT_MESSAGE_SECONDS
        if is_due and self._saved not in (None, self._announced_saved) and self._saved_step is not None:
            self._announced_saved, self._announced_saved_at = self._saved, now
            messages.append(f"checkpoint saved at step {self._saved_step:,}{fit_suffix(self._saved[0])}")
        return messages

    def _start_message(self, step: int, fit: int) -> str:
        how = f"training resumes after step {step:,}{fit_suffix(fit)}" if step else "training begins"
        notes = [f"restart {self._attempt}"] if self._attempt else []
        if self._announced_jobs not in ("", self._jobs):
            notes.append(f"before with {self._announced_jobs}")
        return f"{how} with {self._jobs}" + (f" ({', '.join(notes)})" if notes else "")

    def _record_saves(self, now: float) -> None:
        if self._monitor is None or self._monitor.saved is None:
            return
        fit, saved = self._monitor.fit, self._monitor.saved
        if saved > self._saves.get(fit, -1):
            self._saves[fit] = saved
            self._saved, self._saved_step, self._saved_at = (fit, saved), self._monitor.saved_step, now
