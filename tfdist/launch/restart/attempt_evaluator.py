"""Evaluates the attempts of a run: messages, error file, and either the exit code of the run or the next attempt."""

import dataclasses
from typing import Any

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.restart.error_file import error_entry
from tfdist.launch.restart.restart_policy import RestartPolicy


@dataclasses.dataclass(frozen=True)
class AttemptEvaluation:
    """What follows an attempt, the same on every host.

    Args:
        lines: Messages for the user.
        error_entry: Content of the error files if the attempt failed.
        exit_code: Exit code of the run, or None if another attempt follows.
        workers: Number of workers of the next attempt.
        delay_seconds: Time from the failure to its start.
    """

    lines: list[str]
    error_entry: dict[str, Any] | None = None
    exit_code: int | None = None
    workers: int = 0
    delay_seconds: float = 0.0


class AttemptEvaluator:
    """Evaluates the attempts of a run one after the other.

    Args:
        restarts: Decides whether a failed attempt is restarted.
        run_id: Identifies the run.

    >>> from tfdist.launch.restart.worker_exit import WorkerExit
    >>> no_restart = RestartPolicy(workers=1, min_workers=1, max_restarts=0, delay_seconds=1.0)
    >>> evaluator = AttemptEvaluator(no_restart, "f00d")
    >>> evaluator.evaluate(Outcome(0, 1, (WorkerExit(0, 3),)), is_stopped=False).exit_code
    3
    """

    def __init__(self, restarts: RestartPolicy, run_id: str) -> None:
        self._restarts, self.run_id = restarts, run_id
        self._failed: list[dict[str, Any]] = []  # failed attempts, for the error files

    @property
    def may_restart(self) -> bool:
        """Whether a failure now may be followed by a restart."""
        return self._restarts.is_left

    def evaluate(self, outcome: Outcome, *, is_stopped: bool, available: int | None = None) -> AttemptEvaluation:
        """Decides what follows. Call this once for each attempt.

        Args:
            outcome: Outcome of the attempt on all hosts.
            is_stopped: Whether a supervisor received a signal.
            available: Number of workers that the hosts have room for; None: all.
        """
        if outcome.is_preempted and (is_stopped or not self._restarts.is_left):
            lines = [f"preempted: all workers saved and exited (exit code {PREEMPTED_EXIT_CODE})"]
            return AttemptEvaluation(lines, exit_code=PREEMPTED_EXIT_CODE)
        if not outcome.has_failed:
            return AttemptEvaluation([], exit_code=outcome.exit_code)
        entry = None
        if outcome.is_preempted:
            lines = ["all workers saved and exited, although this command received no signal"]
        else:
            lines, entry = outcome.report(), error_entry(outcome, self.run_id, earlier=self._failed)
            self._failed.append({"attempt": outcome.attempt, "cause": outcome.describe()})
        if is_stopped:
            return AttemptEvaluation(lines, entry, exit_code=outcome.exit_code)
        decision = self._restarts.decide(outcome, available=available)
        lines = [*lines, *([decision.text] if decision.text else [])]
        exit_code = None if decision.workers else outcome.exit_code
        return AttemptEvaluation(lines, entry, exit_code, decision.workers, decision.delay_seconds)
