"""The outcome of an attempt: one start of all workers, until all have exited; its form as a message, and as a file."""

import dataclasses
import datetime
import json
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tfdist.launch.restart.worker_exit import WorkerExit, root_cause
from tfdist.launch.run_spec import Role
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.formatting import signal_name

# A message that would be longer has fewer of the workers' last lines.
_MAX_MESSAGE_BYTES = 2**20
_MAX_LINES = 200
_MAX_LINE_CHARACTERS = 2000
_ERROR_FILE_NAME = re.compile(r"attempt-\d+\.json")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt."""

    attempt: int  # number of the attempt, 0 first
    workers: int
    exits: tuple[WorkerExit, ...]  # how they exited, in order of time
    # the processes, by rank; empty: all are workers that run the script
    roles: Mapping[int, Role] = dataclasses.field(default_factory=dict)
    started_at: float = 0.0  # seconds since 1970
    failed_at: float = 0.0  # monotonic time in seconds at which the workers were signalled or had exited
    seconds: float = 0.0  # time from the start to `failed_at`
    stop_signal: int | None = None  # the signal that this command received, or None
    stall: str = ""  # description of the stall, or an empty string
    lost: str = ""  # which host was lost, and why, or an empty string
    start_failure: tuple[int, OSError] | None = None  # the rank that could not be started, and the error, or None
    too_few: str = ""  # how many workers of an elastic attempt were left, if too few, or an empty string
    left_out: frozenset[int] = frozenset()  # the ranks that had been lost, and without which the others trained
    heartbeat_ranks: frozenset[int] = frozenset()  # the ranks that sent heartbeats
    fit: int = 1  # number of the last `fit` call of the script, 1 first
    step: int | None = None  # the highest step of any worker in that `fit`, or None
    saved: int | None = None  # the highest sequence number of a checkpoint of that `fit`, or None
    # the exceptions that workers reported by heartbeat, by rank: `type` and `message`
    errors: Mapping[int, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def root_cause(self) -> WorkerExit | None:
        """The worker that failed first, or None if the attempt did not fail because of one worker."""
        if self.stall or self.lost or self.start_failure or self.stop_signal is not None:
            return None
        # A worker that reported an exception by heartbeat may have printed nothing before it was killed.
        reported = (worker for worker in self.exits if worker.rank in self.errors and worker.was_signalled)
        return root_cause(self.exits) or next(reported, None)

    @property
    def failed_from_outside(self) -> bool:
        """Whether a lost host or a signal ended the attempt, and no error of the script.

        >>> Outcome(0, 2, (WorkerExit(1, -9),)).failed_from_outside
        True
        """
        cause = self.root_cause
        if cause is None:
            return bool(self.lost) and not self.stall
        return cause.is_killed_from_outside and not cause.was_signalled and cause.rank not in self.errors

    @property
    def failed_rank(self) -> int | None:
        """The rank of the worker that failed first or could not be started, or None."""
        if self.start_failure is not None:
            return self.start_failure[0]
        return None if self.root_cause is None else self.root_cause.rank

    @property
    def is_preempted(self) -> bool:
        """Whether all workers saved and exited after a preemption signal. Some may have exited with 0 before."""
        exits = [worker for worker in self.exits if self.runs_script(worker.rank)]
        others_failed = any(worker.failed for worker in self.exits if not self.runs_script(worker.rank))
        expected = sum(role.runs_script for role in self.roles.values()) if self.roles else self.workers
        return (
            any(worker.is_preempted for worker in exits)
            and all(worker.is_preempted or worker.returncode == 0 for worker in exits)
            and len(exits) == expected - len(self.left_out)
            and (self.stop_signal is not None or not others_failed)
        )

    def task(self, rank: int) -> str:
        """Returns the name of a process in messages, for example "worker 0" or "ps 0"."""
        return self.roles[rank].name if self.roles else f"worker {rank}"

    def runs_script(self, rank: int) -> bool:
        return not self.roles or self.roles[rank].runs_script

    @property
    def has_failed(self) -> bool:
        """Whether the attempt failed. A signal to this command is not a failure."""
        return self.stop_signal is None and bool(
            self.stall or self.lost or self.start_failure or self.too_few or self.root_cause
        )

    @property
    def exit_code(self) -> int:
        """The exit code of a run that ends with this attempt, unless all workers were preempted."""
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        if not self.has_failed:
            return 0
        cause = self.root_cause
        # The exit code of a worker that was signalled during its error says nothing about the error.
        if cause is None or (cause.was_signalled and not cause.failure_reason):
            return 1
        return cause.exit_code or 1  # a server that exits with 0 while it is needed has failed, too

    def describe(self) -> str:
        """Returns the cause in one line.

        >>> Outcome(0, 1, (WorkerExit(0, 3),)).describe()
        'worker 0: exit code 3'
        """
        if self.stall or self.lost:
            return self.stall or self.lost
        if self.start_failure is not None:
            rank, error = self.start_failure
            return f"{self.task(rank)} could not be started: {error}"
        if self.root_cause is not None:
            return f"{self.root_cause.name}: {self.root_cause.describe()}"
        return self.too_few or "no failure"

    def report(self) -> list[str]:
        """Returns lines that describe the failure to the user, the root cause last."""
        cause = self.root_cause
        later_exit_lines = [
            f"{worker.name} ended after that: {worker.describe()}" for worker in self.exits if worker != cause
        ]
        return [
            *later_exit_lines,
            *(cause.report() if cause is not None else [f"the attempt failed: {self.describe()}"]),
        ]


def has_completed(exits: Iterable[WorkerExit], roles: Mapping[int, Role]) -> bool:
    """Whether a process that runs the script has exited successfully without being signalled."""
    return any(
        roles[worker.rank].runs_script and not worker.was_signalled and (worker.returncode == 0 or worker.is_preempted)
        for worker in exits
    )


def fit_suffix(number: int) -> str:
    """Returns the words behind the number of a step: none in the first `fit`, because most scripts have only one."""
    return "" if number == 1 else f" of fit {number}"


def encode_outcome(outcome: Outcome) -> dict[str, Any]:
    """Returns the message for an outcome. A long message has fewer of the workers' last lines."""
    lines = _MAX_LINES
    while True:
        exits = [dataclasses.asdict(worker_exit) for worker_exit in outcome.exits]
        for worker_exit in exits:
            worker_exit["last_lines"] = [line[:_MAX_LINE_CHARACTERS] for line in worker_exit["last_lines"][-lines:]]
        if lines <= 1 or len(json.dumps(exits)) <= _MAX_MESSAGE_BYTES:
            break
        lines //= 2
    start_failure = outcome.start_failure
    return {
        "workers": outcome.workers,
        "exits": exits,
        "stall": outcome.stall,
        "start_failure": None if start_failure is None else [start_failure[0], str(start_failure[1])],
        "left_out": sorted(outcome.left_out),
        "heartbeat_ranks": sorted(outcome.heartbeat_ranks),
        "fit": outcome.fit,
        "step": outcome.step,
        "saved": outcome.saved,
        "errors": [[rank, dict(error)] for rank, error in outcome.errors.items()],
    }


def decode_outcome(message: Mapping[str, Any], host: str) -> Outcome:
    """Returns the outcome of a message. ValueError, KeyError and TypeError mean that it is malformed."""
    start_failure = message["start_failure"]
    errors = message["errors"]
    return Outcome(
        attempt=0,
        workers=int(message["workers"]),
        exits=tuple(_decode_exit(worker_exit, host) for worker_exit in message["exits"]),
        stall=str(message["stall"]),
        start_failure=None if start_failure is None else (int(start_failure[0]), OSError(str(start_failure[1]))),
        left_out=frozenset(int(rank) for rank in message["left_out"]),
        heartbeat_ranks=frozenset(int(rank) for rank in message["heartbeat_ranks"]),
        fit=int(message["fit"]),
        step=_optional_int(message["step"]),
        saved=_optional_int(message["saved"]),
        errors={int(rank): {str(key): str(value) for key, value in error.items()} for rank, error in errors},
    )


def _decode_exit(message: Mapping[str, Any], host: str) -> WorkerExit:
    return WorkerExit(
        int(message["rank"]),
        int(message["returncode"]),
        tuple(str(line) for line in message["last_lines"]),
        was_signalled=bool(message["was_signalled"]),
        failure_reason=str(message["failure_reason"]),
        at=float(message["at"]),
        task=str(message["task"]),
        host=host,
    )


def _optional_int(number: Any) -> int | None:
    return None if number is None else int(number)


class ErrorFile:
    """One file for the last failed attempt, or, without `path`, one for each attempt in the log directory, if there is
    one.

    With `is_new_run` the files of an earlier run are removed immediately.
    """

    def __init__(self, path: Path | None, directory: Path | None, *, is_new_run: bool = True) -> None:
        self._path, self._directory = path, directory
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            if is_new_run:
                self.clear()
        except OSError as error:
            raise UsageError(
                f"The error file cannot be written. Received: {path or directory} ({error.strerror}). Expected: a file "
                "that can be created or replaced (--error-file), or none. Choose another path."
            ) from error

    def clear(self) -> None:
        """Removes the files of an earlier run."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        elif self._directory is not None:
            for file in self._directory.iterdir():
                if _ERROR_FILE_NAME.fullmatch(file.name):
                    file.unlink(missing_ok=True)  # another host may use the same directory

    def write(self, entry: dict[str, Any]) -> str:
        """Writes an entry of `error_entry` atomically; returns why it could not be written, or an empty string."""
        path = self._path
        if path is None:
            if self._directory is None:
                return ""
            path = self._directory / f"attempt-{entry['attempt']}.json"
        try:
            atomic_files.write(path, f"{json.dumps(entry, indent=2)}\n".encode())
        except OSError as error:
            return f"the error file {path} could not be written ({error.strerror})"
        return ""


def error_entry(outcome: Outcome, run_id: str, *, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the content of the file."""
    root_cause = outcome.root_cause
    rank = outcome.failed_rank
    cause: dict[str, Any] = {
        "rank": rank,
        "task": None if rank is None else outcome.task(rank),
        "description": outcome.describe(),
    }
    if root_cause is not None:
        reported = outcome.errors.get(root_cause.rank, {})
        cause |= _exit_entry(root_cause)
        cause |= {
            "exception": reported.get("type") or root_cause.exception or None,
            "message": reported.get("message"),
            "last_lines": list(root_cause.last_lines),
        }
    return {
        "run": run_id,
        "attempt": outcome.attempt,
        "workers": outcome.workers,
        "host": socket.gethostname(),
        "started": _time(outcome.started_at),
        "failed": _time(outcome.started_at + outcome.seconds),
        "last_fit": outcome.fit,
        "last_step": outcome.step,
        "last_saved": outcome.saved,
        "cause": {"host": (root_cause.host if root_cause else "") or socket.gethostname(), **cause},
        "exits": [_exit_entry(worker) for worker in outcome.exits],
        "earlier": list(earlier),
    }


def _exit_entry(worker: WorkerExit) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "task": worker.task or f"worker {worker.rank}",
        "exit_code": worker.returncode if worker.returncode >= 0 else None,
        "signal": signal_name(-worker.returncode) if worker.returncode < 0 else None,
        "was_signalled": worker.was_signalled,
        "description": worker.describe(),
        "ended": _time(worker.at),
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
