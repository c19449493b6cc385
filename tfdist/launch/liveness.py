"""Judges by the heartbeats which worker is frozen, and whether the training stands still."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.json_object import json_object
from tfdist.launch.fits import of_fit
from tfdist.launch.roles import Role, peers

# A beat comes every 0.25 s; gaps up to 1.3 s were seen where a worker held its GIL on a loaded host.
_SUSPICIOUS_SECONDS = 2.0
_STALL_FACTOR = 10
_START_SECONDS = 30.0
# Longer than this between two looks, the launcher itself did not run: the time does not count.
_MAX_LOOK_SECONDS = 1.0


@dataclasses.dataclass
class Pulse:
    """What is known of one worker. Times are in seconds in which the launcher looked."""

    fit: int = 1  # what follows is counted anew in each
    step: int | None = None
    saved: int | None = None
    saved_step: int | None = None
    phase: str | None = None
    batch: int | None = None  # of the phase
    error: Mapping[str, str] | None = None
    heard_at: float | None = None  # None: not heard yet, or leaving: it is not judged
    stepped_at: float | None = None  # the last step or batch of a phase, or the beginning of a phase that has some
    stopped_at: float | None = None  # when its process was seen to be stopped
    has_beaten: bool = False
    is_leaving: bool = False

    @property
    def last_step(self) -> str:
        """What to add to a message."""
        return "" if self.step is None else f" (last step {self.step}{of_fit(self.fit)})"

    @property
    def is_in_silent_phase(self) -> bool:
        """Whether neither steps nor batches are expected of it."""
        return self.phase is not None and self.batch is None


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a look at the workers showed.

    Args:
        frozen: By rank, the reason.
        stall: Why the training stands still, or an empty string.
        news: What to tell the user.
    """

    frozen: Mapping[int, str]
    stall: str
    news: tuple[str, ...]


class Liveness:
    """The heartbeats of all workers of an attempt.

    A worker is judged from its first heartbeat on: before that TensorFlow starts, and nothing else in the process runs.
    A stopped process (SIGSTOP) is one at any time. No step of any worker for ten times the longest interval between two
    steps so far, and at least `stall_timeout_seconds`, is a stall. Batches of a phase that has some, as validation has,
    count as steps do. A later `fit` of the program is judged by its own steps.

    Args:
        workers: Number of workers.
        first_rank: The rank of the first of them.
        roles: What each process is, by rank; empty: all are workers that make steps.
        now: Monotonic time in seconds.
        heartbeat_timeout_seconds: Silence after which a worker is frozen. 0: never.
        stall_timeout_seconds: The least time without a step that is a stall. 0: never.

    >>> liveness = Liveness(1, now=0.0, heartbeat_timeout_seconds=1.0, stall_timeout_seconds=0.0)
    >>> liveness.hear(0, b'{"alive": true, "step": 41}', now=0.5)
    >>> liveness.judge({0: False}, now=1.4).frozen, liveness.judge({0: False}, now=1.5).frozen
    ({}, {0: 'no heartbeat for 1 s (last step 41)'})
    """

    def __init__(
        self,
        workers: int,
        *,
        first_rank: int = 0,
        roles: Mapping[int, Role] | None = None,
        now: float,
        heartbeat_timeout_seconds: float,
        stall_timeout_seconds: float,
    ) -> None:
        self._roles = roles or dict(enumerate(peers(workers, first_rank), first_rank))
        self._pulses = {rank: Pulse() for rank in self._roles}
        self._timeout, self._stall_timeout = heartbeat_timeout_seconds, stall_timeout_seconds
        self._now, self._time = now, 0.0
        self._moved_at: float | None = None  # the last step, batch or checkpoint of any worker
        self._longest_seconds: float | None = None  # between two steps of a worker; None: not two steps yet

    @property
    def is_judging(self) -> bool:
        """Whether anything is judged at all."""
        return self._timeout > 0 or self._stall_timeout > 0

    @property
    def heard(self) -> frozenset[int]:
        """The ranks that sent heartbeats."""
        return frozenset(rank for rank, pulse in self._pulses.items() if pulse.has_beaten)

    @property
    def fit(self) -> int:
        """Which `fit` of the program runs, 1 first."""
        return max((pulse.fit for pulse in self._pulses.values()), default=1)

    @property
    def step(self) -> int | None:
        """The highest step of any worker in it, or None."""
        return max((pulse.step for pulse in self._in_fit if pulse.step is not None), default=None)

    @property
    def saved(self) -> int | None:
        """The highest sequence number of a checkpoint of it, or None."""
        return max((pulse.saved for pulse in self._in_fit if pulse.saved is not None), default=None)

    @property
    def saved_step(self) -> int | None:
        """The training steps that this checkpoint holds, or None."""
        return max(self._in_fit, key=lambda pulse: -1 if pulse.saved is None else pulse.saved).saved_step

    @property
    def phase(self) -> str | None:
        """What a worker does instead of training steps, or None where all make them."""
        return next((pulse.phase for pulse in self._pulses.values() if pulse.phase is not None), None)

    @property
    def is_training(self) -> bool:
        """Whether a worker has made two steps, or has had the time to."""
        return self._longest_seconds is not None or self._time >= _START_SECONDS

    @property
    def errors(self) -> dict[int, Mapping[str, str]]:
        """The exceptions that the workers told of, by rank."""
        return {rank: pulse.error for rank, pulse in self._pulses.items() if pulse.error is not None}

    def forget(self, rank: int) -> None:
        """Takes note that another process has the rank now."""
        self._pulses[rank] = Pulse()

    def hear(self, rank: int, datagram: bytes, *, now: float) -> None:
        """Takes a heartbeat (see `tfdist.cluster.heartbeat`). What is not one is ignored."""
        try:
            said = json_object(datagram)
        except ValueError:
            return
        self._look(now)
        pulse = self._pulses[rank]
        pulse.has_beaten = True
        pulse.is_leaving = said.get("alive") is False
        pulse.heard_at = None if pulse.is_leaving else self._time
        if isinstance(said.get("error"), dict):
            pulse.error = {str(key): str(value) for key, value in said["error"].items()}
        if self._roles[rank].runs_script:
            self._note_progress(pulse, said)

    def judge(self, is_stopped: Mapping[int, bool], *, now: float) -> Judgement:
        """Looks at all workers that run.

        Args:
            is_stopped: For each running worker whether its process is stopped.
            now: Monotonic time in seconds.
        """
        self._look(now)
        news = [line for rank, stopped in is_stopped.items() for line in self._notice(rank, stopped)]
        frozen = {rank: reason for rank in is_stopped if (reason := self._why_frozen(self._pulses[rank]))}
        return Judgement(frozen, self._stall(is_stopped), tuple(news))

    def suspects(self, is_stopped: Mapping[int, bool]) -> bool:
        """Whether a running worker is silent for so long that it may be about to be found frozen."""
        silences = [
            self._time - pulse.heard_at for rank in is_stopped if (pulse := self._pulses[rank]).heard_at is not None
        ]
        return self._timeout > 0 and (any(is_stopped.values()) or max(silences, default=0.0) >= _SUSPICIOUS_SECONDS)

    @property
    def _in_fit(self) -> list[Pulse]:
        fit = self.fit
        return [pulse for pulse in self._pulses.values() if pulse.fit == fit]

    def _note_progress(self, pulse: Pulse, said: Mapping[str, Any]) -> None:
        if pulse.is_in_silent_phase:
            # The time without steps is no interval between two of them.
            self._moved_at, pulse.stepped_at = self._time, None
        fit, phase, batch = said.get("fit"), said.get("phase"), said.get("batch")
        step, saved, saved_step = said.get("step"), said.get("saved"), said.get("saved_step")
        self._note_fit(pulse, fit if type(fit) is int else 1)
        if type(saved) is int and saved != pulse.saved:
            pulse.saved, self._moved_at = saved, self._time
            pulse.saved_step = saved_step if type(saved_step) is int else None
        before = pulse.step, pulse.batch
        pulse.step = step if type(step) is int else pulse.step
        pulse.phase = phase if isinstance(phase, str) else None
        pulse.batch = batch if type(batch) is int and pulse.phase is not None else None
        if (pulse.step, pulse.batch) != before:
            if pulse.stepped_at is not None:
                self._longest_seconds = max(self._longest_seconds or 0.0, self._time - pulse.stepped_at)
            pulse.stepped_at = self._moved_at = self._time

    def _note_fit(self, pulse: Pulse, fit: int) -> None:
        if fit > self.fit:
            self._longest_seconds = None  # its steps may be longer, and its first one is traced
        if fit != pulse.fit:
            pulse.fit, pulse.step, pulse.saved, pulse.saved_step = fit, None, None, None
            self._moved_at, pulse.stepped_at = self._time, None

    def _look(self, now: float) -> None:
        self._time += min(max(now - self._now, 0.0), _MAX_LOOK_SECONDS)
        self._now = now

    def _notice(self, rank: int, stopped: bool) -> list[str]:
        pulse = self._pulses[rank]
        if stopped == (pulse.stopped_at is not None):
            return []
        pulse.stopped_at = self._time if stopped else None
        if not stopped:
            return [f"{self._roles[rank].name} goes on again"]
        then = f": frozen, unless it goes on within {self._timeout:g} s" if self._timeout else ""
        return [f"{self._roles[rank].name} is stopped (as by SIGSTOP){then}{pulse.last_step}"]

    def _why_frozen(self, pulse: Pulse) -> str:
        if self._timeout <= 0:
            return ""
        if pulse.stopped_at is not None and self._time - pulse.stopped_at >= self._timeout:
            return f"stopped for {self._timeout:g} s{pulse.last_step}"
        if pulse.heard_at is not None and self._time - pulse.heard_at >= self._timeout:
            why = ", as it is stopped" if pulse.stopped_at is not None else ""
            return f"no heartbeat for {self._timeout:g} s{why}{pulse.last_step}"
        return ""

    def _stall(self, is_stopped: Mapping[int, bool]) -> str:
        if self._stall_timeout <= 0 or self._moved_at is None or self._longest_seconds is None:
            return ""
        # Where one has ended the others may have no step left to do.
        training = {rank: pulse for rank, pulse in self._pulses.items() if self._roles[rank].runs_script}
        is_excused = any(pulse.is_in_silent_phase or pulse.is_leaving for pulse in training.values())
        if is_excused or not training.keys() <= is_stopped.keys():
            return ""
        limit = max(self._stall_timeout, _STALL_FACTOR * self._longest_seconds)
        if self._time - self._moved_at < limit:
            return ""
        steps = ", ".join(str(pulse.step) for pulse in training.values())
        phase = next((pulse.phase for pulse in training.values() if pulse.phase is not None), None)
        what = "made a step" if phase is None else f"got through a batch of {phase}"
        return f"no worker {what} for {limit:.0f} s (last steps: {steps}{of_fit(self.fit)})"
