"""The JSON file that tells programs why an attempt failed."""

import datetime
import json
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from tfdist.launch.errors import UsageError
from tfdist.launch.failure import WorkerEnd, signal_name
from tfdist.launch.outcome import Outcome

_NAME = re.compile(r"attempt-\d+\.json")


class ErrorFile:
    """One file for the last failed attempt, or a file an attempt in the directory of the logs.

    Args:
        path: The file, written anew by every failed attempt; None: `attempt-<number>.json` in `directory`.
        directory: The directory of the logs; None, and no path: nothing is written.
        is_new_run: Whether those of an earlier run are removed at once.

    Raises:
        UsageError: If the file cannot be written there.
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
                "that can be made or replaced (--error-file), or none. Choose another path."
            ) from error

    def clear(self) -> None:
        """Removes what an earlier run has left.

        Raises:
            OSError: If that cannot be removed, or there is no such directory.
        """
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        elif self._directory is not None:
            for file in self._directory.iterdir():
                if _NAME.fullmatch(file.name):
                    file.unlink(missing_ok=True)  # another host may have the same directory

    def write(self, entry: dict[str, Any]) -> str:
        """Writes what `describe` has returned, whole or not at all.

        Returns:
            Why it could not be written, or an empty string.
        """
        path = self._path
        if path is None:
            if self._directory is None:
                return ""
            path = self._directory / f"attempt-{entry['attempt']}.json"
        try:
            _write_whole(path, json.dumps(entry, indent=2) + "\n")
        except OSError as error:
            return f"the error file {path} could not be written ({error.strerror})"
        return ""


def describe(outcome: Outcome, run_id: str, *, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the file says.

    Args:
        outcome: The failed attempt.
        run_id: The run it belongs to.
        earlier: The number and the cause, in one line, of each failed attempt before.

    >>> describe(Outcome(0, 1, (WorkerEnd(0, -9),)), "f00d", earlier=[])["cause"]["signal"]
    'SIGKILL'
    """
    first = outcome.cause
    rank = outcome.failed_rank
    what: dict[str, Any] = {
        "rank": rank,
        "task": None if rank is None else outcome.task(rank),
        "description": outcome.describe(),
    }
    if first is not None:
        told = outcome.errors.get(first.rank, {})
        what |= _end(first)
        what |= {
            "exception": told.get("type") or first.exception or None,
            "message": told.get("message"),
            "last_lines": list(first.last_lines),
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
        "cause": {"host": (first.host if first else "") or socket.gethostname(), **what},
        "ends": [_end(end) for end in outcome.ends],
        "earlier": list(earlier),
    }


def _end(end: WorkerEnd) -> dict[str, Any]:
    return {
        "rank": end.rank,
        "task": end.task or f"worker {end.rank}",
        "exit_code": end.returncode if end.returncode >= 0 else None,
        "signal": signal_name(-end.returncode) if end.returncode < 0 else None,
        "was_told": end.was_told,
        "description": end.describe(),
        "ended": _time(end.at),
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(unfinished, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
