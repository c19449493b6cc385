"""Files through which `from_notebook` and its workers exchange a function, its values and its errors."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from tfdist.utils import atomic_files

CALL = "call.pickle"
FAILURE = "failure.json"


class RankFiles:
    """The result of one rank in one attempt: a value, the reason why it cannot be pickled, or an error.

    Each file appears complete or not at all.

    Args:
        directory: Directory of the call, readable by this user only.
        attempt: Number of the attempt, from 0.
        rank: Rank of the worker.
    """

    def __init__(self, directory: Path, attempt: int, rank: int) -> None:
        self._stem = directory / f"attempt-{attempt}" / f"rank-{rank}"

    @property
    def value(self) -> Path:
        """The pickled value."""
        return self._stem.with_suffix(".value")

    def write_value(self, dump: Callable[[IO[bytes]], None]) -> None:
        """Writes the value.

        Args:
            dump: Writes it to a binary file. If it raises, no file remains.
        """
        with self._replacing(self.value) as file:
            dump(file)

    def write_pickling_error(self, kind: str, reason: str) -> None:
        """Writes the type of a value that cannot be pickled, and the reason."""
        self._write_json(".pickling-error", {"type": kind, "reason": reason})

    def write_error(self, kind: str, message: str, traceback: str) -> None:
        """Writes the exception that the function raised."""
        self._write_json(".error", {"type": kind, "message": message, "traceback": traceback})

    def pickling_error(self) -> dict[str, Any] | None:
        """Returns `type` and `reason`, or None if there is no such file."""
        return _read_json(self._stem.with_suffix(".pickling-error"))

    def error(self) -> dict[str, Any] | None:
        """Returns `type`, `message` and `traceback`, or None if there is no such file."""
        return _read_json(self._stem.with_suffix(".error"))

    def _replacing(self, path: Path) -> AbstractContextManager[IO[bytes]]:
        path.parent.mkdir(exist_ok=True)
        return atomic_files.replacing(path, durable=False)

    def _write_json(self, suffix: str, content: dict[str, Any]) -> None:
        with self._replacing(self._stem.with_suffix(suffix)) as file:
            file.write(json.dumps(content).encode())


def read_failure(directory: Path) -> dict[str, Any] | None:
    """Returns the launcher's error file of the last failed attempt (see `error_file.py`), or None."""
    return _read_json(directory / FAILURE)


def last_attempt(directory: Path) -> int:
    """Returns the number of the last attempt in which a worker has written a file, or 0."""
    return max((int(path.name.partition("-")[2]) for path in directory.glob("attempt-*")), default=0)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return dict(content)
