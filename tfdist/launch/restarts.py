"""Whether a failed run is started again, when, and with how many workers."""

import dataclasses
import re

from tfdist.launch.failure import WorkerEnd, tells_of_a_lost_peer
from tfdist.launch.fits import of_fit
from tfdist.launch.outcome import Outcome

MAX_DELAY_SECONDS = 30.0
# A script that sends no heartbeats is taken to have begun, and to have got on, after this time.
_SILENT_SECONDS = 60.0
_MAX_ATTEMPTS_WITHOUT_PROGRESS = 2
# What fails before training though nothing is wrong with the script: a lost race for a port, a peer that never came.
_PASSING = re.compile(
    r"The cluster was not complete|This task's own port is taken|Could not start gRPC server|Address already in use"
)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What follows after a failed attempt.

    Args:
        workers: How many workers to start; 0: the run ends.
        delay_seconds: Time from the failure to the next start.
        text: What to tell the user; an empty string: nothing.
    """

    workers: int
    delay_seconds: float
    text: str


class Restarts:
    """Counts restarts and progress.

    Progress is a step or a checkpoint beyond the highest that all attempts before have come to in the same `fit`; a
    script may have several, and an attempt passes through, or leaves out, those that are complete. Two restarts in a
    row without it end the run. So does a first attempt in which a worker ends by itself with an error
    before its first heartbeat: a wrong argument or import fails again.

    Args:
        workers: The full number of workers.
        min_workers: The number below which the run does not go.
        max_restarts: How many restarts are allowed in all.
        delay_seconds: Time from a failure to the next start after an attempt without progress, doubled after each
            further one, up to 30 s. After one with progress there is none.

    >>> restarts = Restarts(workers=2, min_workers=2, max_restarts=1, delay_seconds=1.0)
    >>> restarts.after(Outcome(0, 2, (WorkerEnd(1, -9),), heard=frozenset({0, 1}), step=41)).text
    'restart 1 of 1 at once with 2 workers'
    """

    def __init__(self, *, workers: int, min_workers: int, max_restarts: int, delay_seconds: float) -> None:
        self._workers, self._min_workers = workers, min_workers
        self._max, self._first_delay = max_restarts, delay_seconds
        self._done = 0
        self._heard = False
        # The highest ones of each `fit`, by its number: an attempt may have left out some that others have made.
        self._steps: dict[int, int] = {}
        self._saves: dict[int, int] = {}
        self._last_fit = 1
        self._attempts_without_progress = 0
        self._delay = 0.0
        self._failed_rank: int | None = None  # in the attempt before, where that had all workers

    @property
    def are_left(self) -> bool:
        """Whether a failure now may be followed by a restart."""
        return self._done < self._max

    def after(self, outcome: Outcome, *, available: int | None = None) -> Decision:
        """Decides what follows after a failed attempt. To be asked once an attempt.

        Args:
            outcome: The failed attempt.
            available: How many workers there is room for; None: all.
        """
        if self._max == 0:
            return Decision(0, 0.0, "")
        self._note_progress(outcome)
        reason = self._why_not(outcome)
        if reason:
            return Decision(0, 0.0, f"not started again: {reason}")
        self._done += 1
        workers = min(self._resize(outcome), self._workers if available is None else available)
        when = f"in {self._delay:g} s" if self._delay else "at once"
        fewer = f", {self._workers - workers} fewer than asked for" if workers < self._workers else ""
        counted = "1 worker" if workers == 1 else f"{workers} workers"
        return Decision(workers, self._delay, f"restart {self._done} of {self._max} {when} with {counted}{fewer}")

    def _note_progress(self, outcome: Outcome) -> None:
        self._heard = self._heard or any(map(outcome.runs_script, outcome.heard))
        is_further = [
            _is_further(known, outcome.fit, number)
            for known, number in ((self._steps, outcome.step), (self._saves, outcome.saved))
        ]
        has_progress = any(is_further) if self._heard else outcome.seconds >= _SILENT_SECONDS
        self._last_fit = outcome.fit
        doubled = min(2 * self._delay, max(MAX_DELAY_SECONDS, self._first_delay))
        self._delay = 0.0 if has_progress else doubled or self._first_delay
        # The first attempt is the start, not a restart.
        without = 0 if has_progress or outcome.attempt == 0 else self._attempts_without_progress + 1
        self._attempts_without_progress = without

    def _why_not(self, outcome: Outcome) -> str:
        if not self.are_left:
            return f"no restart is left (--max-restarts {self._max})"
        first = outcome.cause
        if first is not None and self._failed_before_it_began(outcome, first):
            return (
                f"{first.name} ended by itself {outcome.seconds:.0f} s after the first start and before its "
                "first heartbeat, and would do so again"
            )
        if self._attempts_without_progress < _MAX_ATTEMPTS_WITHOUT_PROGRESS:
            return ""
        if not self._heard:
            return f"the last two restarts ended within {_SILENT_SECONDS:g} s"
        fit, step = self._last_fit, self._steps.get(self._last_fit, -1)
        beyond = f"beyond step {step}{of_fit(fit)}" if step >= 0 else f"to a first step{of_fit(fit)}"
        return f"the last two restarts made no progress (none got {beyond}, none saved a new checkpoint)"

    def _failed_before_it_began(self, outcome: Outcome, first: WorkerEnd) -> bool:
        if outcome.attempt > 0 or first.rank in outcome.heard or outcome.seconds >= _SILENT_SECONDS:
            return False
        if first.returncode <= 0 or first.verdict or first.is_preempted:
            return False
        words = "\n".join(first.last_lines)
        return not (tells_of_a_lost_peer(words) or _PASSING.search(words))

    def _resize(self, outcome: Outcome) -> int:
        """One worker less where the same rank failed twice in a row or cannot be started; else all of them."""
        before, self._failed_rank = self._failed_rank, None
        if outcome.unstarted is None:
            if outcome.workers < self._workers:
                return self._workers
            if outcome.failed_rank is None or outcome.failed_rank != before:
                self._failed_rank = outcome.failed_rank
                return self._workers
        return max(self._min_workers, outcome.workers - 1)


def _is_further(known: dict[int, int], fit: int, number: int | None) -> bool:
    """Notes the number that a `fit` has come to; returns whether it is the highest so far."""
    before = known.get(fit, -1)
    known[fit] = max(before, -1 if number is None else number)
    return known[fit] > before
