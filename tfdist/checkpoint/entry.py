"""What stands in a store: checkpoints that are whole or broken, and what is left of saves that ended early."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfdist.checkpoint.checkpoint import PREFIX, Checkpoint
from tfdist.checkpoint.durable import REMOVED_PREFIX
from tfdist.checkpoint.errors import BrokenError, OtherFormatError
from tfdist.checkpoint.shard import Json

UNFINISHED_PREFIX = ".unfinished-"
_CHECKPOINT = re.compile(re.escape(PREFIX) + r"(\d{10})")
_LEFTOVER = re.compile(rf"(?:{re.escape(UNFINISHED_PREFIX)}|{re.escape(REMOVED_PREFIX + PREFIX)})(\d{{10}})-(.+)")

Status = Literal["whole", "broken", "other format", "unfinished"]


@dataclass(frozen=True)
class Entry:
    """One directory of a store.

    Attributes:
      sequence: the checkpoint's number.
      path: its directory.
      status: "whole"; "broken"; "other format" if another version of tfdist wrote it; "unfinished" for a save that is
        running or was cut off, and for one whose removal was.
      reason: why it is not whole, else "".
      size_bytes: the size of the files that are there.
      world: the number of ranks that wrote it; None if it is not whole. So the next two.
      saved_at: when it was saved, in seconds since 1970.
      facts: what the writer wanted to be known.
    """

    sequence: int
    path: Path
    status: Status
    reason: str = ""
    size_bytes: int = 0
    world: int | None = None
    saved_at: float | None = None
    facts: Json | None = None


def checkpoints(directory: Path) -> dict[int, Path]:
    """The directories under a final name, by their numbers, the newest first. Empty if there is no such directory."""
    found = {int(match[1]): path for path, match in _matching(directory, _CHECKPOINT)}
    return dict(sorted(found.items(), reverse=True))


def leftovers(directory: Path) -> list[tuple[int, str, Path]]:
    """What saves or removals that ended early left: number, attempt ("" for a removal) and path, the oldest first."""
    return sorted(
        (int(match[1]), match[2] if path.name.startswith(UNFINISHED_PREFIX) else "", path)
        for path, match in _matching(directory, _LEFTOVER)
    )


def inspect(sequence: int, path: Path, *, every_byte: bool) -> Entry:
    """Looks whether a checkpoint is whole.

    Raises:
      OSError: if this user may not read it, or the file system does not answer.
    """
    size = _size_bytes(path)
    try:
        checkpoint = Checkpoint(path, every_byte=every_byte)
    except OtherFormatError as error:
        return Entry(sequence, path, "other format", str(error), size)
    except BrokenError as error:
        return Entry(sequence, path, "broken", str(error), size)
    return Entry(sequence, path, "whole", "", size, checkpoint.world, checkpoint.saved_at, checkpoint.facts)


def unfinished(sequence: int, path: Path) -> Entry:
    """The entry of a leftover."""
    removed = path.name.startswith(REMOVED_PREFIX)
    reason = "its removal was cut off" if removed else "a save that is running, or was cut off"
    return Entry(sequence, path, "unfinished", reason, _size_bytes(path))


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    try:
        matches = [(path, pattern.fullmatch(path.name)) for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    return [(path, match) for path, match in matches if match]


def _size_bytes(path: Path) -> int:
    total = 0
    for file in [path, *path.rglob("*")]:
        try:
            total += file.lstat().st_size if not file.is_dir() else 0
        except FileNotFoundError:  # removed since it was listed
            continue
    return total
