"""One run of the workers of this host: attempt after attempt, until one succeeds or no other would help."""

import contextlib
import datetime
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from tfdist.launch.attempt import Attempt
from tfdist.launch.crew import Crew
from tfdist.launch.error_file import ErrorFile
from tfdist.launch.guardian import Guardian
from tfdist.launch.limits import Limits
from tfdist.launch.linux import become_subreaper
from tfdist.launch.liveness import Liveness
from tfdist.launch.others import Others
from tfdist.launch.outcome import Outcome
from tfdist.launch.output import Console, OutputClosed
from tfdist.launch.replacements import Replacements
from tfdist.launch.roles import Role, peers
from tfdist.launch.run_status import RunStatus
from tfdist.launch.settlement import Settlement, Settlements
from tfdist.launch.spares import Spares
from tfdist.launch.stop_signals import StopSignals
from tfdist.launch.worker_process import children, end_strays


class Supervisor:
    """Runs attempts in one thread, the main thread.

    Args:
        command: What every worker runs.
        environments: Returns the whole environment of each worker, given the number of workers and of the attempt.
        console: Where output and messages go.
        logs: A log file for each worker, or None.
        workers: Number of workers of the first attempt.
        roles: Returns what the processes are, given the number of workers and the rank of the first.
        worker_restarts: How often a worker that is started again alone is, in an attempt; None: always.
        limits: When workers are judged or ended.
        settlements: Decide what follows after each attempt.
        error_file: Tells programs of failures.
        warm_spares: Whether to keep a process that has imported TensorFlow for each worker of the next attempt.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Callable[[int, int], Sequence[Mapping[str, str]]],
        console: Console,
        logs: Sequence[BinaryIO | None],
        *,
        workers: int,
        roles: Callable[[int, int], Sequence[Role]] = peers,
        worker_restarts: int | None = None,
        limits: Limits,
        settlements: Settlements,
        error_file: ErrorFile,
        warm_spares: bool = False,
    ) -> None:
        self._command, self._environments = command, environments
        self._console, self._logs, self._workers = console, logs, workers
        self._limits, self._settlements, self._error_file = limits, settlements, error_file
        self._roles, self._worker_restarts = roles, worker_restarts
        self._warm_spares = warm_spares
        self._status = RunStatus(workers)
        self._attempt: Attempt | None = None

    def run(self) -> int:
        """Runs the workers to their end.

        Returns:
            0; 75 where all workers were preempted; the exit code of the first failure of the last attempt; or 128 +
            the number of the signal that ended the run.

        Raises:
            OSError: If a worker could not be started in the first attempt.
        """
        become_subreaper()
        spared = children()
        self._guardian = Guardian()
        self._spared = {*spared, self._guardian.pid}
        running_script = sum(role.runs_script for role in self._roles(self._workers, 0))
        self._spares = Spares(self._command, running_script if self._warm_spares else 0)
        try:
            with StopSignals(on_repeat=self._kill) as self._signals:
                # Ctrl-C ends all of a pipeline: that `tee` is gone then must not keep the workers from saving.
                self._console.outlive_reader(lambda: bool(self._signals.received))
                return self._run_attempts()
        except OutputClosed:
            # As for any command whose reader went away.
            return 128 + signal.SIGPIPE
        finally:
            self._spares.end()
            for log in self._logs:
                if log is not None:
                    log.close()
            self._guardian.close()

    def _run_attempts(self) -> int:
        number, workers = 0, self._workers
        while True:
            outcome = self._run_attempt(number, workers, may_restart=self._settlements.may_restart)
            if outcome.unstarted is not None and number == 0 and not self._signals.received:
                raise outcome.unstarted[1]
            settlement = self._settlements.after(outcome, is_stopped=bool(self._signals.received))
            self._tell(settlement)
            if settlement.code is not None:
                return settlement.code
            self._wait_until(outcome.failed_at + settlement.delay_seconds)
            if self._signals.received:
                return 128 + self._signals.received[0]
            number, workers = number + 1, settlement.workers

    def _run_attempt(
        self, number: int, workers: int, *, may_restart: bool, first_rank: int = 0, others: Others | None = None
    ) -> Outcome:
        if number:
            self._separate_logs(number)
        roles = self._roles(workers, first_rank)
        replaced = [rank for rank, role in enumerate(roles, first_rank) if role.is_replaced]
        liveness = Liveness(
            workers,
            first_rank=first_rank,
            roles=dict(enumerate(roles, first_rank)),
            now=time.monotonic(),
            heartbeat_timeout_seconds=self._limits.heartbeat_timeout,
            stall_timeout_seconds=self._limits.stall_timeout,
        )
        attempt = Attempt(
            number,
            roles,
            self._environments(workers, number),
            self._console,
            self._logs,
            replacements=Replacements(replaced, limit=self._worker_restarts),
            crew=Crew(self._guardian, self._spares, keeps_spares=may_restart, spared=self._spared),
            signals=self._signals,
            graces=self._limits.graces(may_restart=may_restart),
            liveness=liveness,
            first_rank=first_rank,
            others=others,
        )
        self._attempt = attempt
        self._status.begin(number, roles, liveness, now=time.monotonic())
        self._console.follow(self._status, now=time.monotonic())
        try:
            return attempt.run()
        finally:
            self._attempt = None
            with contextlib.suppress(OutputClosed):  # if it was closed before, that is on its way already
                self._console.follow(None, now=time.monotonic())
            end_strays(spared=self._spared | self._spares.pids)

    def _tell(self, settlement: Settlement) -> None:
        trouble = "" if settlement.entry is None else self._error_file.write(settlement.entry)
        self._console.say(*([trouble] if trouble else []), *settlement.lines)

    def _separate_logs(self, number: int) -> None:
        time_of_day = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        for log in self._logs:
            if log is not None:
                # A full disk: as little a reason to end the run as a line too few.
                with contextlib.suppress(OSError):
                    log.write(f"==== attempt {number}, {time_of_day} ====\n".encode())

    def _wait_until(self, end: float) -> None:
        """Waits until a monotonic time, or a signal that ends the run."""
        while (left := end - time.monotonic()) > 0 and not self._signals.received:
            select.select([self._signals.fd], [], [], left)
            self._signals.clear_wakeup()

    def _kill(self) -> None:
        if self._attempt is not None:
            self._attempt.kill()
