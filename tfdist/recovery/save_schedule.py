"""Decides when a checkpoint is due, by steps, seconds and epochs, on all workers at the same step."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.recovery.worker_coordination import Coordination
from tfdist.utils.argument_checks import check_whole_number, is_number

_MAX_STEPS_BETWEEN_DECISIONS = 1000


@dataclass(frozen=True)
class SaveInterval:
    """How often to save. A checkpoint is due when any of the given intervals has passed; without one, after each epoch.

    Raises:
        ValueError: If an interval is invalid.
    """

    steps: int | None = None  # training steps; with gradient accumulation, micro-steps
    seconds: float | None = None  # from the end of one save to the beginning of the next, by the chief's clock
    epochs: int | None = None  # the checkpoint is saved at the end of an epoch

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None and self.epochs is None:
            object.__setattr__(self, "epochs", 1)
        for name, value in (("every_steps", self.steps), ("every_epochs", self.epochs)):
            if value is not None:
                check_whole_number(name, value, at_least=1)
        if self.seconds is not None and not (is_number(self.seconds, at_least=0) and self.seconds > 0):
            raise ValueError(
                f"Invalid `every_seconds`. Received: every_seconds={self.seconds!r}. Expected: a finite number of "
                "seconds above 0, or None."
            )


class SaveSchedule:
    """Decides after each step whether to save. All workers ask at the same steps and get the same answer.

    Clocks differ between workers. So for `seconds` the chief decides, at steps that all workers know, whether to save
    now and at which step to decide again.
    """

    def __init__(self, interval: SaveInterval, coordination: Coordination, step: int) -> None:
        """Starts at `step`, the number of steps since the training began."""
        self._interval, self._coordination = interval, coordination
        self._step = self._next_decision = step
        self._decisions = 0
        self._last_save = self._started = time.monotonic()
        self._first_step = step

    def is_due(self, step: int) -> bool:
        """Returns whether to save after `step`, the number of steps since the training began."""
        previous, self._step = self._step, step
        every = self._interval.steps
        due_by_steps = every is not None and step // every != previous // every
        due_by_time = self._interval.seconds is not None and step >= self._next_decision and self._decide(step)
        return due_by_steps or due_by_time

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Returns whether to save after `epoch`, counted from 0."""
        return self._interval.epochs is not None and (epoch + 1) % self._interval.epochs == 0

    def saved(self) -> None:
        """Restarts the clock. Call this after every save, whatever the reason for it."""
        self._last_save = time.monotonic()

    def state(self) -> dict[str, Any]:
        """Returns, as JSON, what another worker needs to find the same steps."""
        since_save = time.monotonic() - self._last_save
        return {"step": self._step, "next_decision": self._next_decision, "seconds_since_save": since_save}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues like the worker that has returned a `state`."""
        self._step = self._first_step = int(state["step"])
        self._next_decision = int(state["next_decision"])
        self._started = time.monotonic()
        self._last_save = self._started - float(state["seconds_since_save"])

    def _decide(self, step: int) -> bool:
        seconds, now = self._interval.seconds or 0.0, time.monotonic()
        due = now - self._last_save >= seconds
        steps_per_second = (step - self._first_step) / max(now - self._started, 1e-6)
        remaining = seconds if due else seconds - (now - self._last_save)
        # Half of the remaining steps, because steps may become faster.
        ahead = min(max(1, int(remaining * steps_per_second / 2)), _MAX_STEPS_BETWEEN_DECISIONS)
        self._decisions += 1
        due, ahead = self._coordination.broadcast(f"save/{self._decisions}", [due, ahead])
        self._next_decision = step + ahead
        return bool(due)
