"""The JSON file that describes why an attempt failed, for other programs."""

import datetime
import json
import re
import socket
from pathlib import Path
from typing import Any

from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.restart.worker_exit import WorkerExit
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.formatting import signal_name

_NAME = re.compile(r"attempt-\d+\.json")


class ErrorFile:
    """One file for the last failed attempt, or one file for each attempt in the log directory.

    Args:
        path: The file, replaced by every failed attempt; None: `attempt-<number>.json` in `directory`.
        directory: The log directory; None, and no path: nothing is written.
        is_new_run: Whether to remove the files of an earlier run immediately.

    Raises:
        UsageError: If the file cannot be written.
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
        """Removes the files of an earlier run.

        Raises:
            OSError: If a file cannot be removed, or the directory does not exist.
        """
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        elif self._directory is not None:
            for file in self._directory.iterdir():
                if _NAME.fullmatch(file.name):
                    file.unlink(missing_ok=True)  # another host may use the same directory

    def write(self, entry: dict[str, Any]) -> str:
        """Writes an entry of `error_entry` atomically.

        Returns:
            Why it could not be written, or an empty string.
        """
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
    """Returns the content of the file.

    >>> error_entry(Outcome(0, 1, (WorkerExit(0, -9),)), "f00d", earlier=[])["cause"]["signal"]
    'SIGKILL'
    """
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
