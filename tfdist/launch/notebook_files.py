"""The files through which a notebook and its workers exchange a function and its values."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

CALL = "call.pickle"
FAILURE = "failure.json"


class RankFiles:
    """What one rank leaves behind in one attempt: a value, why that cannot be sent, or the error that was raised.

    Each is written under another name first, so that it is there whole or not at all.

    Args:
        directory: Of the call; only this user can read it.
        attempt: Number of the attempt, 0 first.
        rank: The worker's rank.
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
            dump: Writes it to a file. What it raises is passed on, and nothing is left then.
        """
        with whole_file(self.value) as file:
            dump(file)

    def write_refusal(self, kind: str, reason: str) -> None:
        """Writes of which type a value is that cannot be sent, and why it cannot."""
        _write_json(self._stem.with_suffix(".refusal"), {"type": kind, "reason": reason})

    def write_error(self, kind: str, message: str, traceback: str) -> None:
        """Writes what the function has raised."""
        _write_json(self._stem.with_suffix(".error"), {"type": kind, "message": message, "traceback": traceback})

    def refusal(self) -> dict[str, Any] | None:
        """Returns `type` and `reason`, or None."""
        return _read_json(self._stem.with_suffix(".refusal"))

    def error(self) -> dict[str, Any] | None:
        """Returns `type`, `message` and `traceback`, or None."""
        return _read_json(self._stem.with_suffix(".error"))


def failure(directory: Path) -> dict[str, Any] | None:
    """Returns what the launcher says of the last failed attempt (see `error_file.py`), or None."""
    return _read_json(directory / FAILURE)


def last_attempt(directory: Path) -> int:
    """Returns the number of the last attempt in which a worker has left anything; 0 if none has."""
    return max((int(path.name.partition("-")[2]) for path in directory.glob("attempt-*")), default=0)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that takes its name when the block has ended well, and is gone otherwise."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "wb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(content).encode())


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return dict(content)
