"""Detects frozen workers and a stalled training by the workers' heartbeats."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.launch.restart.attempt_outcome import fit_suffix
from tfdist.launch.run_spec import Role
from tfdist.utils.active_clock import ActiveClock
from tfdist.utils.argument_checks import is_number
from tfdist.utils.formatting import counted
from tfdist.utils.json_messages import json_object

# Heartbeats come every 0.25 s. Gaps up to 1.3 s were measured where a worker held its GIL on a loaded host.
_SUSPICIOUS_SECONDS = 2.0
_STALL_FACTOR = 10
_START_SECONDS = 30.0


@dataclasses.dataclass
class _WorkerState:
    """State of one worker. Times are in seconds of the monitor's clock."""

    fit: int = 1  # the fields below are reset in each `fit`
    step: int | None = None
    saved: int | None = None
    saved_step: int | None = None
    phase: str | None = None
    batch: int | None = None  # number of completed batches of the phase
    error: Mapping[str, str] | None = None
    heartbeat_at: float | None = None  # None: no heartbeat yet, or exiting: silence is not judged
    stepped_at: float | None = None  # the last step or batch of a phase, or the start of a phase that has batches
    stopped_at: float | None = None  # when its process was found stopped
    has_sent_heartbeat: bool = False
    is_exiting: bool = False
    has_trained: bool = False  # whether its process has made a step, or reported losses and joins

    @property
    def last_step(self) -> str:
        """The last step, as a suffix of a message."""
        return "" if self.step is None else f" (last step {self.step}{fit_suffix(self.fit)})"

    @property
    def is_in_silent_phase(self) -> bool:
        """Whether neither steps nor batches are expected of it."""
        return self.phase is not None and self.batch is None


@dataclasses.dataclass(frozen=True)
class MembershipChanges:
    """Losses and joins of the workers of an elastic training, and what they cost.

    >>> MembershipChanges(1, 1, 2, 0.25).plus(MembershipChanges(1, 0, 1, 0.35)).describe()
    '2 workers lost, 1 joined; 3 steps computed again, 0.6 s lost'
    """

    lost: int = 0
    joined: int = 0
    repeated_steps: int = 0
    seconds_lost: float = 0.0

    def plus(self, other: "MembershipChanges") -> "MembershipChanges":
        """Returns the changes of two attempts together."""
        return self._combined(other, sum)

    def maximum(self, other: "MembershipChanges") -> "MembershipChanges":
        """Returns the changes of one attempt that two workers have seen."""
        return self._combined(other, max)

    def describe(self) -> str:
        steps = f"{counted(self.repeated_steps, 'step')} computed again"
        return f"{counted(self.lost, 'worker')} lost, {self.joined} joined; {steps}, {self.seconds_lost:.1f} s lost"

    def _combined(self, other: "MembershipChanges", combine: Callable[[Any], Any]) -> "MembershipChanges":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return MembershipChanges(*map(combine, pairs))


@dataclasses.dataclass(frozen=True)
class HealthReport:
    """The health of all workers."""

    frozen: Mapping[int, str]  # the reason for each frozen worker, by rank
    stall: str  # description of the stall, or an empty string
    messages: tuple[str, ...]  # changes to show to the user


class HeartbeatMonitor:
    """Receives the heartbeats of all workers of an attempt.

    A worker is *frozen* if it sends no heartbeat for `heartbeat_timeout_seconds` after its first one (before the first
    one TensorFlow starts and blocks every thread), or if its process is stopped (SIGSTOP) for that time. The training
    *stalls* if no worker makes a step for ten times the longest interval between two steps so far, and for at least
    `stall_timeout_seconds`. Batches of a phase that has some, such as validation, count as steps. Each `fit` of the
    script is judged by its own steps. Times are monotonic, in seconds. A timeout of 0 never expires.
    """

    def __init__(
        self,
        roles: Mapping[int, Role],
        *,
        now: float,
        heartbeat_timeout_seconds: float,
        stall_timeout_seconds: float,
    ) -> None:
        self._roles = roles
        self._workers = {rank: _WorkerState() for rank in roles}
        self._timeout, self._stall_timeout = heartbeat_timeout_seconds, stall_timeout_seconds
        self._clock, self._time = ActiveClock(now=now), 0.0
        self._progress_at: float | None = None  # the last step, batch or checkpoint of any worker
        self._longest_step_seconds: float | None = None  # None: fewer than two steps of any worker
        self._membership: MembershipChanges | None = None
        self.resized_to: int | None = None  # number of workers that `tfdist resize` has requested last
        self._training: tuple[int, int | None] = (0, None)  # the most losses and joins, and who trains after them
        self._former_heartbeat_ranks: set[int] = set()  # of processes that run the script and were replaced

    @property
    def is_enabled(self) -> bool:
        """Whether workers can be frozen or the training can stall."""
        return self._timeout > 0 or self._stall_timeout > 0

    @property
    def heartbeat_ranks(self) -> frozenset[int]:
        present = {rank for rank, worker in self._workers.items() if worker.has_sent_heartbeat}
        return frozenset(present | self._former_heartbeat_ranks)

    @property
    def fit(self) -> int:
        """Number of the latest `fit` of the script, 1 first."""
        return max((worker.fit for worker in self._workers.values()), default=1)

    @property
    def step(self) -> int | None:
        """The highest step of any worker in this `fit`, or None."""
        return max((worker.step for worker in self._in_fit if worker.step is not None), default=None)

    @property
    def saved(self) -> int | None:
        """The highest sequence number of a checkpoint of this `fit`, or None."""
        return max((worker.saved for worker in self._in_fit if worker.saved is not None), default=None)

    @property
    def saved_step(self) -> int | None:
        """The training steps that this checkpoint contains, or None."""
        return max(self._in_fit, key=lambda worker: -1 if worker.saved is None else worker.saved).saved_step

    @property
    def phase(self) -> str | None:
        """What a worker does instead of training steps, for example "validation"; None if all train."""
        return next((worker.phase for worker in self._workers.values() if worker.phase is not None), None)

    @property
    def membership(self) -> MembershipChanges | None:
        """The most losses and joins that any worker of the attempt has seen, or None if none has reported any."""
        return self._membership

    @property
    def training(self) -> int | None:
        """Number of workers of all hosts that train, after the last loss or join; None: none was reported."""
        return self._training[1]

    @property
    def trained_ranks(self) -> frozenset[int]:
        """The ranks whose present process has made a step or reported losses and joins."""
        return frozenset(rank for rank, worker in self._workers.items() if worker.has_trained)

    @property
    def has_begun(self) -> bool:
        """Whether workers have found one another: one has trained, or sends heartbeats without steps, as in a loop."""
        return any(
            worker.has_trained or (worker.has_sent_heartbeat and worker.step is None)
            for worker in self._workers.values()
        )

    @property
    def is_training(self) -> bool:
        """Whether a worker has made two steps, or had enough time for them."""
        return self._longest_step_seconds is not None or self._time >= _START_SECONDS

    @property
    def errors(self) -> dict[int, Mapping[str, str]]:
        """The exceptions that workers reported, by rank: `type` and `message`."""
        return {rank: worker.error for rank, worker in self._workers.items() if worker.error is not None}

    def reset(self, rank: int) -> None:
        """Forgets a worker because another process takes its rank."""
        if self._roles[rank].is_elastic and self._workers[rank].has_sent_heartbeat:
            self._former_heartbeat_ranks.add(rank)
        self._workers[rank] = _WorkerState()
        if self._roles[rank].is_elastic and not self.trained_ranks:
            self._progress_at = None  # while the workers of other hosts train, those of this one have to join them

    def receive(self, rank: int, datagram: bytes, *, now: float) -> None:
        """Processes a heartbeat (see `tfdist.cluster.heartbeat`). Malformed datagrams are ignored."""
        try:
            message = json_object(datagram)
        except ValueError:
            return
        self._time = self._clock.advance(now)
        worker = self._workers[rank]
        if isinstance(message.get("membership"), dict):
            self._record_membership(worker, message["membership"])
            if len(message) == 1:
                return
        worker.has_sent_heartbeat = True
        worker.is_exiting = message.get("alive") is False
        worker.heartbeat_at = None if worker.is_exiting else self._time
        if isinstance(message.get("error"), dict):
            worker.error = {str(key): str(value) for key, value in message["error"].items()}
        if self._roles[rank].runs_script:
            self._record_progress(worker, message)

    def check(self, is_stopped: Mapping[int, bool], *, now: float) -> HealthReport:
        """Checks all running workers. `is_stopped` says of each of them whether its process is stopped."""
        self._time = self._clock.advance(now)
        messages = [line for rank, stopped in is_stopped.items() for line in self._record_stop(rank, stopped)]
        frozen = {rank: reason for rank in is_stopped if (reason := self._freeze_reason(self._workers[rank]))}
        return HealthReport(frozen, self._stall(is_stopped), tuple(messages))

    def suspects_freeze(self, is_stopped: Mapping[int, bool]) -> bool:
        """Whether a running worker has been silent long enough that it may soon be found frozen."""
        silences = [
            self._time - worker.heartbeat_at
            for rank in is_stopped
            if (worker := self._workers[rank]).heartbeat_at is not None
        ]
        return self._timeout > 0 and (any(is_stopped.values()) or max(silences, default=0.0) >= _SUSPICIOUS_SECONDS)

    @property
    def _in_fit(self) -> list[_WorkerState]:
        fit = self.fit
        return [worker for worker in self._workers.values() if worker.fit == fit]

    def _record_progress(self, worker: _WorkerState, message: Mapping[str, Any]) -> None:
        if worker.is_in_silent_phase:
            # The time without steps is not an interval between two of them.
            self._progress_at, worker.stepped_at = self._time, None
        fit, phase, batch = message.get("fit"), message.get("phase"), message.get("batch")
        step, saved, saved_step = message.get("step"), message.get("saved"), message.get("saved_step")
        self._record_fit(worker, fit if type(fit) is int else 1)
        if type(saved) is int and saved != worker.saved:
            worker.saved, self._progress_at = saved, self._time
            worker.saved_step = saved_step if type(saved_step) is int else None
        before = worker.step, worker.batch
        worker.step = step if type(step) is int else worker.step
        worker.phase = phase if isinstance(phase, str) else None
        worker.batch = batch if type(batch) is int and worker.phase is not None else None
        worker.has_trained |= before[0] is not None and worker.step not in (None, before[0])
        if (worker.step, worker.batch) != before:
            if worker.stepped_at is not None:
                self._longest_step_seconds = max(self._longest_step_seconds or 0.0, self._time - worker.stepped_at)
            worker.stepped_at = self._progress_at = self._time

    def _record_membership(self, worker: _WorkerState, totals: Mapping[str, Any]) -> None:
        names = [field.name for field in dataclasses.fields(MembershipChanges)]
        if totals.keys() >= set(names) and all(is_number(totals[name], at_least=0) for name in names):
            worker.has_trained = True
            changes = MembershipChanges(*(totals[name] for name in names))
            self._membership = changes if self._membership is None else self._membership.maximum(changes)
            # A worker that has seen fewer changes is late, or cut off from the others.
            if changes.lost + changes.joined >= self._training[0] and is_number(totals.get("training"), at_least=0):
                self._training = changes.lost + changes.joined, int(totals["training"])

    def _record_fit(self, worker: _WorkerState, fit: int) -> None:
        if fit > self.fit:
            self._longest_step_seconds = None  # its steps may take longer, and its first one is traced
        if fit != worker.fit:
            worker.fit, worker.step, worker.saved, worker.saved_step = fit, None, None, None
            self._progress_at, worker.stepped_at = self._time, None

    def _record_stop(self, rank: int, stopped: bool) -> list[str]:
        worker = self._workers[rank]
        if stopped == (worker.stopped_at is not None):
            return []
        worker.stopped_at = self._time if stopped else None
        if not stopped:
            return [f"{self._roles[rank].name} continues"]
        then = f": frozen unless it continues within {self._timeout:g} s" if self._timeout else ""
        return [f"{self._roles[rank].name} is stopped (as by SIGSTOP){then}{worker.last_step}"]

    def _freeze_reason(self, worker: _WorkerState) -> str:
        if self._timeout <= 0:
            return ""
        if worker.stopped_at is not None and self._time - worker.stopped_at >= self._timeout:
            return f"stopped for {self._timeout:g} s{worker.last_step}"
        if worker.heartbeat_at is not None and self._time - worker.heartbeat_at >= self._timeout:
            why = ", because it is stopped" if worker.stopped_at is not None else ""
            return f"no heartbeat for {self._timeout:g} s{why}{worker.last_step}"
        return ""

    def _stall(self, is_stopped: Mapping[int, bool]) -> str:
        if self._stall_timeout <= 0 or self._progress_at is None or self._longest_step_seconds is None:
            return ""
        training = {rank: worker for rank, worker in self._workers.items() if self._roles[rank].runs_script}
        # When one has exited the others may have no step left, unless they train on without it.
        if any(rank not in is_stopped and not self._roles[rank].is_elastic for rank in training):
            return ""
        training = {rank: worker for rank, worker in training.items() if rank in is_stopped}
        if any(worker.is_in_silent_phase or worker.is_exiting for worker in training.values()):
            return ""
        limit = max(self._stall_timeout, _STALL_FACTOR * self._longest_step_seconds)
        if self._time - self._progress_at < limit:
            return ""
        steps = ", ".join(str(worker.step) for worker in training.values())
        phase = next((worker.phase for worker in training.values() if worker.phase is not None), None)
        progress_text = "made a step" if phase is None else f"finished a batch of {phase}"
        return f"no worker {progress_text} for {limit:.0f} s (last steps: {steps}{fit_suffix(self.fit)})"
