"""What follows after an attempt, on one host or on several."""

import dataclasses
from typing import Any

from tfdist.cluster.exit_codes import PREEMPTED_EXIT_CODE
from tfdist.launch.error_file import describe
from tfdist.launch.outcome import Outcome
from tfdist.launch.restarts import Restarts


@dataclasses.dataclass(frozen=True)
class Settlement:
    """What every host is told after an attempt.

    Args:
        lines: What to tell the user.
        entry: What the error files say, where it has failed.
        code: The exit code of the run, or None where another attempt follows.
        workers: How many workers that is to have.
        delay_seconds: Time from the failure to its start.
    """

    lines: list[str]
    entry: dict[str, Any] | None = None
    code: int | None = None
    workers: int = 0
    delay_seconds: float = 0.0


class Settlements:
    """Settles the attempts of a run one after the other.

    Args:
        restarts: Decides what follows after a failure.
        run_id: What tells this run from others.

    >>> from tfdist.launch.failure import WorkerEnd
    >>> none_left = Restarts(workers=1, min_workers=1, max_restarts=0, delay_seconds=1.0)
    >>> Settlements(none_left, "f00d").after(Outcome(0, 1, (WorkerEnd(0, 3),)), is_stopped=False).code
    3
    """

    def __init__(self, restarts: Restarts, run_id: str) -> None:
        self._restarts, self._run_id = restarts, run_id
        self._failed: list[dict[str, Any]] = []  # attempts, for the error files

    @property
    def may_restart(self) -> bool:
        """Whether a failure now may be followed by a restart."""
        return self._restarts.are_left

    def after(self, outcome: Outcome, *, is_stopped: bool, available: int | None = None) -> Settlement:
        """Decides what follows. To be asked once an attempt.

        Args:
            outcome: How the attempt ended, on all hosts.
            is_stopped: Whether a supervisor was told to end.
            available: How many workers there is room for; None: all.
        """
        if outcome.is_preempted and (is_stopped or not self._restarts.are_left):
            lines = [f"preempted: all workers saved and left (exit code {PREEMPTED_EXIT_CODE})"]
            return Settlement(lines, code=PREEMPTED_EXIT_CODE)
        if not outcome.has_failed:
            return Settlement([], code=outcome.exit_code)
        if outcome.is_preempted:
            lines, entry = ["all workers saved and left, though this command was not told to end"], None
        else:
            lines, entry = outcome.report(), describe(outcome, self._run_id, earlier=self._failed)
            self._failed.append({"attempt": outcome.attempt, "cause": outcome.describe()})
        if is_stopped:
            return Settlement(lines, entry, code=outcome.exit_code)
        decision = self._restarts.after(outcome, available=available)
        lines = [*lines, *([decision.text] if decision.text else [])]
        code = None if decision.workers else outcome.exit_code
        return Settlement(lines, entry, code, decision.workers, decision.delay_seconds)
