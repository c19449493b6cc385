"""When a checkpoint is due: by steps, by seconds, by epochs; on all workers at the same step."""

import time
from dataclasses import dataclass

from tfdist.recovery.agreement import Agreement

_MOST_STEPS_UNHEARD = 1000


@dataclass(frozen=True)
class Interval:
    """How often to save. What is given counts, each on its own.

    Attributes:
      steps: a checkpoint at least every so many training steps (micro-steps, with gradient accumulation).
      seconds: the same by the chief's clock, from the end of one save to the beginning of the next.
      epochs: at the end of every so many epochs.
    """

    steps: int | None = None
    seconds: float | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("every_steps", self.steps, (int,)),
            ("every_seconds", self.seconds, (int, float)),
            ("every_epochs", self.epochs, (int,)),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value <= 0):
                whole = "a whole number of 1 or more" if float not in kinds else "a number above 0"
                raise ValueError(f"`{name}` is no interval. Received: {name}={value!r}. Expected: {whole}, or None.")


class Schedule:
    """Tells after each step whether to save; every worker asks at the same steps and hears the same.

    A clock cannot decide on each worker for itself. So the chief says, at steps that all know, whether to save now
    and at which step to ask again.
    """

    def __init__(self, interval: Interval, agreement: Agreement, step: int) -> None:
        """Begins at `step`."""
        self._interval, self._agreement = interval, agreement
        self._step = self._ask_at = step
        self._asked = 0
        self._last_save = self._began = time.monotonic()
        self._began_at_step = step

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`, the number of steps done since the training began."""
        before, self._step = self._step, step
        every = self._interval.steps
        due_by_steps = every is not None and step // every != before // every
        due_by_time = self._interval.seconds is not None and step >= self._ask_at and self._ask(step)
        return due_by_steps or due_by_time

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Whether to save after `epoch`, counted from 0."""
        return self._interval.epochs is not None and (epoch + 1) % self._interval.epochs == 0

    def saved(self) -> None:
        """To be called when a save was made, for whatever reason."""
        self._last_save = time.monotonic()

    def _ask(self, step: int) -> bool:
        seconds, now = self._interval.seconds or 0.0, time.monotonic()
        due = now - self._last_save >= seconds
        steps_a_second = (step - self._began_at_step) / max(now - self._began, 1e-6)
        left = seconds if due else seconds - (now - self._last_save)
        # Half the way at a time, as steps may become faster.
        ahead = min(max(1, int(left * steps_a_second / 2)), _MOST_STEPS_UNHEARD)
        self._asked += 1
        due, ahead = self._agreement.from_chief(f"save/{self._asked}", [due, ahead])
        self._ask_at = step + ahead
        return bool(due)
