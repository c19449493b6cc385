"""What the workers of a function call leave: files with values and errors, by attempt and rank."""

import dataclasses
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from tfdist.utils import atomic_files

FAILURE = "failure.json"
_STEM = re.compile(r"attempt-(\d+)/rank-(\d+)")


@dataclasses.dataclass(frozen=True)
class RankResult:
    """The result of one rank in one attempt. All are None if its process ended before it could write one.

    Args:
        value: The pickled value.
        pickling_error: `type` and `reason` of a value that cannot be pickled.
        error: `type`, `message` and `traceback` of the exception that the function raised.
    """

    value: bytes | None = None
    pickling_error: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


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

    def begin(self) -> None:
        """Records that the attempt has begun."""
        self._stem.parent.mkdir(exist_ok=True)

    def write_value(self, dump: Callable[[IO[bytes]], None]) -> None:
        """Writes the value.

        Args:
            dump: Writes it to a binary file. If it raises, no file remains.
        """
        with self._replacing(self._stem.with_suffix(".value")) as file:
            dump(file)

    def write_pickling_error(self, kind: str, reason: str) -> None:
        """Writes the type of a value that cannot be pickled, and the reason."""
        self._write_json(".pickling-error", {"type": kind, "reason": reason})

    def write_error(self, kind: str, message: str, traceback: str) -> None:
        """Writes the exception that the function raised."""
        self._write_json(".error", {"type": kind, "message": message, "traceback": traceback})

    def _replacing(self, path: Path) -> AbstractContextManager[IO[bytes]]:
        path.parent.mkdir(exist_ok=True)
        return atomic_files.replacing(path, durable=False)

    def _write_json(self, suffix: str, content: dict[str, Any]) -> None:
        with self._replacing(self._stem.with_suffix(suffix)) as file:
            file.write(json.dumps(content).encode())


def read_results(directory: Path) -> dict[tuple[int, int], RankResult]:
    """Returns the results in a directory, by attempt and rank."""
    stems = {path.relative_to(directory).with_suffix("") for path in directory.glob("attempt-*/rank-*.*")}
    results = {}
    for stem in stems:
        if (match := _STEM.fullmatch(stem.as_posix())) is not None:
            path = directory / stem
            results[int(match[1]), int(match[2])] = RankResult(
                _read(path.with_suffix(".value")),
                _read_json(path.with_suffix(".pickling-error")),
                _read_json(path.with_suffix(".error")),
            )
    return results


def count_attempts(directory: Path) -> int:
    """Returns how many attempts have begun in which workers of this directory call the function."""
    return max((int(path.name.removeprefix("attempt-")) + 1 for path in directory.glob("attempt-*")), default=0)


def read_failure(directory: Path) -> dict[str, Any] | None:
    """Returns the launcher's error file of the last failed attempt (see `error_file.py`), or None."""
    return _read_json(directory / FAILURE)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    content = _read(path)
    return None if content is None else dict(json.loads(content))
