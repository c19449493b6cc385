"""How rank 0 hears of the other ranks' files, through the directory that all of them see."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tfdist.checkpoint import durable
from tfdist.checkpoint.errors import CheckpointError
from tfdist.checkpoint.file_record import FileRecord

_SHORTEST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05
# For how long a program that an error has ended may be kept from its end by ranks that the same has happened to.
_AT_THE_END_SECONDS = 60.0


def write(directory: Path, rank: int, record: FileRecord) -> None:
    """Says that a rank's file is on the disk."""
    _write(directory, rank, asdict(record))


def write_failure(directory: Path, rank: int, error: BaseException) -> None:
    """Says, if it still can, that a rank's file will never be there, so that nobody waits for it."""
    with contextlib.suppress(OSError):
        _write(directory, rank, {"error": f"{type(error).__name__}: {error}"})


def collect(directory: Path, ranks: Iterable[int], *, timeout_seconds: float) -> dict[int, FileRecord]:
    """Waits for the receipts of `ranks`, and removes them.

    It waits less if the program ends meanwhile.

    Raises:
      CheckpointError: if some are missing after `timeout_seconds`, or one of them tells of a failure.
      OSError: if the directory cannot be read, or is gone.
    """
    missing = {_name(rank): rank for rank in ranks}
    records: dict[int, FileRecord] = {}
    end = time.monotonic() + timeout_seconds
    is_ending = False
    pause = _SHORTEST_PAUSE_SECONDS
    while True:
        # Listing the directory, not asking for each file: network file systems remember that a file was not there.
        for name in missing.keys() & set(os.listdir(directory)) if missing else ():
            rank = missing.pop(name)
            records[rank] = _read(directory / name, rank)
        if not missing:
            break
        if not is_ending and not threading.main_thread().is_alive():
            is_ending, end = True, min(end, time.monotonic() + _AT_THE_END_SECONDS)
        if time.monotonic() > end:
            raise CheckpointError(_late(sorted(missing.values()), timeout_seconds, directory))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    for rank in records:
        (directory / _name(rank)).unlink()
    return records


def _name(rank: int) -> str:
    return f"rank-{rank}.receipt"


def _write(directory: Path, rank: int, content: dict[str, object]) -> None:
    durable.write(directory / _name(rank), json.dumps(content).encode())


def _read(path: Path, rank: int) -> FileRecord:
    content = json.loads(path.read_bytes())
    if "error" in content:
        raise CheckpointError(f"Rank {rank} could not write its part of the checkpoint. Received: {content['error']}")
    return FileRecord(**content)


def _late(ranks: list[int], timeout_seconds: float, directory: Path) -> str:
    who = f"Rank {ranks[0]} has" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))} have"
    return (
        f"{who} not written a part of the checkpoint within {timeout_seconds:g} s. Expected: a file of every rank "
        f"in {str(directory)!r}. All ranks must see the same directory, on a file system they share, and save the same "
        "sequence number in the same attempt; if they do and are slow, raise peer_timeout_seconds of "
        "FailureRecovery."
    )
