"""Receipts by which the other ranks report their files to rank 0, through the shared directory of a save."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tfdist.checkpoint.errors import CheckpointError
from tfdist.checkpoint.manifest import FileRecord
from tfdist.utils import atomic_files

_MIN_PAUSE_SECONDS = 0.001
_MAX_PAUSE_SECONDS = 0.05
# How long a program that has failed waits at exit for ranks that failed with the same error.
_TIMEOUT_AT_EXIT_SECONDS = 60.0


def write_receipt(directory: Path, rank: int, record: FileRecord) -> None:
    """Reports that the file of `rank` is on disk."""
    _write(directory, rank, asdict(record))


def write_failure_receipt(directory: Path, rank: int, error: BaseException) -> None:
    """Reports, if possible, that the file of `rank` will not be written, so that rank 0 does not wait for it."""
    with contextlib.suppress(OSError):
        _write(directory, rank, {"error": f"{type(error).__name__}: {error}"})


def collect_receipts(directory: Path, ranks: Iterable[int], *, timeout_seconds: float) -> dict[int, FileRecord]:
    """Waits for the receipts of `ranks` and removes them. Waits at most 60 s if the program exits meanwhile.

    Raises:
        CheckpointError: If receipts are missing after `timeout_seconds`, or one reports a failure.
        OSError: If the directory cannot be read or was removed.
    """
    missing = {_file_name(rank): rank for rank in ranks}
    records: dict[int, FileRecord] = {}
    end = time.monotonic() + timeout_seconds
    is_exiting = False
    pause = _MIN_PAUSE_SECONDS
    while True:
        # Lists the directory instead of looking each file up: network file systems cache that a file is missing.
        for name in missing.keys() & set(os.listdir(directory)) if missing else ():
            rank = missing.pop(name)
            records[rank] = _read(directory / name, rank)
        if not missing:
            break
        if not is_exiting and not threading.main_thread().is_alive():
            is_exiting, end = True, min(end, time.monotonic() + _TIMEOUT_AT_EXIT_SECONDS)
        if time.monotonic() > end:
            raise CheckpointError(_timeout_message(sorted(missing.values()), timeout_seconds, directory))
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
    for rank in records:
        (directory / _file_name(rank)).unlink()
    return records


def _file_name(rank: int) -> str:
    return f"rank-{rank}.receipt"


def _write(directory: Path, rank: int, content: dict[str, object]) -> None:
    atomic_files.write(directory / _file_name(rank), json.dumps(content).encode())


def _read(path: Path, rank: int) -> FileRecord:
    content = json.loads(path.read_bytes())
    if "error" in content:
        raise CheckpointError(f"Rank {rank} could not write its part of the checkpoint. Received: {content['error']}")
    return FileRecord(**content)


def _timeout_message(ranks: list[int], timeout_seconds: float, directory: Path) -> str:
    who = f"Rank {ranks[0]} has" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))} have"
    return (
        f"{who} not written a part of the checkpoint within {timeout_seconds:g} s. Expected: a file of every rank "
        f"in {str(directory)!r}. All ranks must see the same directory, on a file system they share, and save the same "
        "sequence number in the same attempt; if they do and are slow, raise peer_timeout_seconds of "
        "FailureRecovery."
    )
