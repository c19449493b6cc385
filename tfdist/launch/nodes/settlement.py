"""What follows from the outcome of all hosts."""

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


def settle(
    outcome: Outcome,
    restarts: Restarts,
    *,
    is_stopped: bool,
    available: int,
    run_id: str,
    earlier: list[dict[str, Any]],
) -> Settlement:
    """Decides as the supervisor of one host does.

    Args:
        outcome: Of all hosts.
        restarts: Decides what follows after a failure.
        is_stopped: Whether a supervisor was told to end.
        available: How many workers the next attempt may have.
        run_id: The run it belongs to.
        earlier: The failed attempts before, for the error files; this one is added.
    """
    if outcome.is_preempted and (is_stopped or not restarts.are_left):
        lines = [f"preempted: all workers saved and left (exit code {PREEMPTED_EXIT_CODE})"]
        return Settlement(lines, code=PREEMPTED_EXIT_CODE)
    if not outcome.has_failed:
        return Settlement([], code=outcome.exit_code)
    if outcome.is_preempted:
        lines, entry = ["all workers saved and left, though no supervisor was told to end"], None
    else:
        lines, entry = outcome.report(), describe(outcome, run_id, earlier=earlier)
        earlier.append({"attempt": outcome.attempt, "cause": outcome.describe()})
    if is_stopped:
        return Settlement(lines, entry, code=outcome.exit_code)
    decision = restarts.after(outcome, available=available)
    lines = [*lines, *([decision.text] if decision.text else [])]
    code = None if decision.workers else outcome.exit_code
    return Settlement(lines, entry, code, decision.workers, decision.delay_seconds)
