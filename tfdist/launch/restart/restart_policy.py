"""Decides what follows a failure: the end of the run, another attempt, or one worker again while the others train."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.launch.restart.attempt_outcome import Outcome, error_entry, fit_suffix
from tfdist.launch.restart.worker_exit import WorkerExit, reports_lost_peer
from tfdist.launch.run_spec import RunSpec
from tfdist.utils.formatting import counted

FIRST_DELAY_SECONDS = 1.0
MAX_DELAY_SECONDS = 30.0
# A script that sends no heartbeats is assumed to have made progress after this time.
_SILENT_SECONDS = 60.0
_MAX_ATTEMPTS_WITHOUT_PROGRESS = 2
# A worker that ran for this long did not exit because of how it was started: the delay starts over.
LONG_LIFE_SECONDS = 60.0
# Failures before the first step that may pass: a lost race for a port, a peer that did not start.
_TRANSIENT = re.compile(
    r"The (?:cluster was|workers were) not complete|"
    r"The port of this task is in use|Could not start gRPC server|Address already in use"
)


@dataclasses.dataclass(frozen=True)
class RestartDecision:
    """What follows a failed attempt."""

    workers: int  # number of workers to start; 0: the run ends
    delay_seconds: float  # time from the failure to the next start
    text: str  # message for the user; empty: none


class RestartPolicy:
    """Counts restarts and progress.

    Progress is a step or a checkpoint beyond the highest of all earlier attempts in the same `fit`. A script may
    call `fit` several times, and an attempt may skip calls that are complete. Two restarts without progress that
    end with an error of the script, a stall or a frozen worker end the run. A lost host, and a worker that
    something outside has killed (SIGKILL, SIGTERM), say nothing about the script: after such attempts only the
    delay grows. A first attempt in which a worker exits with an error before its first heartbeat ends the run, too,
    because a wrong argument or import fails again.

    There is no delay after an attempt with progress; else `delay_seconds`, which double after each further one, up
    to 30.
    """

    def __init__(self, *, workers: int, min_workers: int, max_restarts: int, delay_seconds: float) -> None:
        self._workers, self._min_workers = workers, min_workers
        self._max, self._first_delay = max_restarts, delay_seconds
        self._done = 0
        self._sends_heartbeats = False
        # The highest step and checkpoint of each `fit`, by its number.
        self._steps: dict[int, int] = {}
        self._saves: dict[int, int] = {}
        self._last_fit = 1
        self._attempts_without_progress = 0
        self._delay = 0.0
        self._failed_rank: int | None = None  # of the attempt before, if that had all workers

    @property
    def is_left(self) -> bool:
        return self._done < self._max

    def decide(self, outcome: Outcome, *, available: int | None = None) -> RestartDecision:
        """Decides what follows. Call this once for each failed attempt.

        `available` is the number of workers that the hosts have room for; None: all.
        """
        if self._max == 0:
            return RestartDecision(0, 0.0, "")
        self._record_progress(outcome)
        reason = self._why_not(outcome)
        if reason:
            return RestartDecision(0, 0.0, f"no restart: {reason}")
        self._done += 1
        workers = min(self._resize(outcome), self._workers if available is None else available)
        when = f"in {self._delay:g} s" if self._delay else "at once"
        fewer = f", {self._workers - workers} fewer than requested" if workers < self._workers else ""
        text = f"restart {self._done} of {self._max} {when} with {counted(workers, 'worker')}{fewer}"
        return RestartDecision(workers, self._delay, text)

    def _record_progress(self, outcome: Outcome) -> None:
        self._sends_heartbeats |= any(map(outcome.runs_script, outcome.heartbeat_ranks))
        is_further = [
            _record_highest(highest, outcome.fit, number)
            for highest, number in ((self._steps, outcome.step), (self._saves, outcome.saved))
        ]
        has_progress = any(is_further) if self._sends_heartbeats else outcome.seconds >= _SILENT_SECONDS
        self._last_fit = outcome.fit
        doubled = min(2 * self._delay, max(MAX_DELAY_SECONDS, self._first_delay))
        self._delay = 0.0 if has_progress else doubled or self._first_delay
        if has_progress:
            self._attempts_without_progress = 0
        elif outcome.attempt > 0 and not outcome.failed_from_outside:  # The first attempt is not a restart.
            self._attempts_without_progress += 1

    def _why_not(self, outcome: Outcome) -> str:
        if not self.is_left:
            return f"all restarts are used (--max-restarts {self._max})"
        root_cause = outcome.root_cause
        if root_cause is not None and self._failed_before_heartbeat(outcome, root_cause):
            return (
                f"{root_cause.name} exited {outcome.seconds:.0f} s after the first start, before its first heartbeat, "
                "and would do so again"
            )
        if self._attempts_without_progress < _MAX_ATTEMPTS_WITHOUT_PROGRESS:
            return ""
        if not self._sends_heartbeats:
            return f"the last two restarts ended within {_SILENT_SECONDS:g} s"
        fit, step = self._last_fit, self._steps.get(self._last_fit, -1)
        beyond = f"beyond step {step}{fit_suffix(fit)}" if step >= 0 else f"to a first step{fit_suffix(fit)}"
        return f"the last two restarts made no progress (none got {beyond}, none saved a new checkpoint)"

    def _failed_before_heartbeat(self, outcome: Outcome, root_cause: WorkerExit) -> bool:
        if outcome.attempt > 0 or root_cause.rank in outcome.heartbeat_ranks or outcome.seconds >= _SILENT_SECONDS:
            return False
        if root_cause.returncode <= 0 or root_cause.failure_reason or root_cause.is_preempted:
            return False
        output = "\n".join(root_cause.last_lines)
        return not (reports_lost_peer(output) or _TRANSIENT.search(output))

    def _resize(self, outcome: Outcome) -> int:
        """Removes one worker if the same rank failed twice in a row or cannot be started; otherwise returns all."""
        previous_failed_rank, self._failed_rank = self._failed_rank, None
        if outcome.start_failure is None:
            if outcome.workers < self._workers:
                return self._workers
            if outcome.failed_rank is None or outcome.failed_rank != previous_failed_rank:
                self._failed_rank = outcome.failed_rank
                return self._workers
        return max(self._min_workers, outcome.workers - 1)


@dataclasses.dataclass
class _RestartState:
    started_at: float = 0.0
    delay: float = 0.0
    restarts_left: int | None = None  # None: no limit
    due_at: float | None = None
    has_exited: bool = False


class WorkerBackoff:
    """The restart times of workers that are restarted one by one. Times are monotonic, in seconds.

    A worker is restarted after 1 s. The delay doubles, up to 30 s, each time the worker ran for less than 60 s.
    """

    def __init__(self, ranks: Iterable[int], *, limit: int | None) -> None:
        self._limit = limit
        self._workers = {rank: _RestartState(restarts_left=limit) for rank in ranks}

    @property
    def is_pending(self) -> bool:
        return any(worker.due_at is not None for worker in self._workers.values())

    @property
    def is_exhausted(self) -> bool:
        """Whether no worker runs or will be restarted."""
        workers = self._workers.values()
        return bool(workers) and all(worker.has_exited and worker.due_at is None for worker in workers)

    def record_start(self, rank: int, *, now: float) -> None:
        """Records that a worker was started. Ranks of other processes are ignored."""
        worker = self._workers.get(rank)
        if worker is not None:
            worker.started_at, worker.due_at, worker.has_exited = now, None, False

    @property
    def none_left(self) -> str:
        return f"no worker is left (--worker-restarts {self._limit})"

    def record_exit(self, rank: int, *, now: float, has_others: bool = False) -> str:
        """Records that a worker exited or could not be started; returns what follows, for the user."""
        worker = self._workers[rank]
        worker.has_exited, worker.due_at = True, None
        if worker.restarts_left == 0:
            is_end = self.is_exhausted and not has_others
            return self.none_left if is_end else f"not restarted (--worker-restarts {self._limit})"
        if worker.restarts_left is not None:
            worker.restarts_left -= 1
        is_young = now - worker.started_at < LONG_LIFE_SECONDS
        worker.delay = min(2 * worker.delay, MAX_DELAY_SECONDS) if worker.delay and is_young else FIRST_DELAY_SECONDS
        worker.due_at = now + worker.delay
        is_last = not has_others and all(state.has_exited for state in self._workers.values())
        meanwhile = "training waits for it" if is_last else "training continues without it"
        return f"{meanwhile}; restart in {worker.delay:g} s"

    def restart_now(self, rank: int, *, now: float) -> None:
        """Has a worker that has exited started at once, which does not count as a restart."""
        self._workers[rank].due_at = now

    def cancel(self, ranks: Iterable[int] | None = None) -> list[int]:
        """Does not restart some workers, by default all; returns those that were to be restarted."""
        among = self._workers if ranks is None else ranks
        pending = [rank for rank in among if self._workers[rank].due_at is not None]
        for rank in pending:
            self._workers[rank].due_at = None
        return pending

    def due(self, *, now: float) -> list[int]:
        return [rank for rank, worker in self._workers.items() if worker.due_at is not None and now >= worker.due_at]


def _record_highest(highest: dict[int, int], fit: int, number: int | None) -> bool:
    """Records the number that a `fit` has reached; returns whether it exceeds all before."""
    previous_highest = highest.get(fit, -1)
    highest[fit] = max(previous_highest, -1 if number is None else number)
    return highest[fit] > previous_highest


@dataclasses.dataclass(frozen=True)
class AttemptEvaluation:
    """What follows an attempt, the same on every host."""

    lines: list[str]  # messages for the user
    error_entry: dict[str, Any] | None = None  # content of the error files if the attempt failed
    exit_code: int | None = None  # exit code of the run, or None if another attempt follows
    workers: int = 0  # number of workers of the next attempt
    delay_seconds: float = 0.0  # time from the failure to its start


class AttemptEvaluator:
    """Evaluates the attempts of a run one after the other."""

    def __init__(self, spec: RunSpec, workers: int) -> None:
        self._restarts = RestartPolicy(
            workers=workers,  # on all hosts together
            # A lost parameter server says nothing about the number of workers.
            min_workers=(not spec.parameter_servers and spec.min_workers) or workers,
            max_restarts=spec.max_restarts,
            delay_seconds=spec.restart_delay,
        )
        self._run_id = spec.run_id
        self._failed: list[dict[str, Any]] = []  # failed attempts, for the error files

    @property
    def may_restart(self) -> bool:
        return self._restarts.is_left

    def evaluate(self, outcome: Outcome, *, is_stopped: bool, available: int | None = None) -> AttemptEvaluation:
        """Decides what follows. Call this once for each attempt.

        `is_stopped` says whether a supervisor received a signal.
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
            lines, entry = outcome.report(), error_entry(outcome, self._run_id, earlier=self._failed)
            self._failed.append({"attempt": outcome.attempt, "cause": outcome.describe()})
        if is_stopped:
            return AttemptEvaluation(lines, entry, exit_code=outcome.exit_code)
        decision = self._restarts.decide(outcome, available=available)
        lines = [*lines, *([decision.text] if decision.text else [])]
        exit_code = None if decision.workers else outcome.exit_code
        return AttemptEvaluation(lines, entry, exit_code, decision.workers, decision.delay_seconds)
