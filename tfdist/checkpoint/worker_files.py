"""Files of a checkpoint that other processes write for rank 0: the workers whose devices hold the stages of a model."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tfdist.checkpoint.errors import CheckpointError
from tfdist.checkpoint.manifest import FileRecord
from tfdist.utils import atomic_files

# TensorFlow's names of the two files of a bundle of tensors, here that of a task.
_WORKER_FILE = re.compile(r"[A-Za-z0-9_]+-\d+\.(index|data-\d{5}-of-\d{5})")
# Network file systems show the files of other hosts late, after some seconds at most.
_VISIBLE_WITHIN_SECONDS = 30.0
_PAUSE_SECONDS = 0.05


class WorkerFiles(Protocol):
    """What the workers write into one checkpoint."""

    @property
    def size_bytes(self) -> int:
        """The size of their tensors."""
        ...

    def write(self, directory: Path) -> Mapping[str, int | None]:
        """Makes the workers write their files into a directory, given by an absolute path.

        Returns:
            The size of each file by its name, or None if it is not known here.

        Raises:
            CheckpointError: If a worker cannot write its file.
        """
        ...


def is_worker_file(name: str) -> bool:
    """Whether a file of a checkpoint has the name of one that a worker writes.

    >>> is_worker_file("worker-3.data-00000-of-00001"), is_worker_file("rank-3.safetensors")
    (True, False)
    """
    return _WORKER_FILE.fullmatch(name) is not None


def record_worker_files(directory: Path, sizes: Mapping[str, int | None]) -> dict[str, FileRecord]:
    """Returns the records of files that workers have written, when they are complete as this process sees them.

    They are read once, in small pieces, and flushed to the disk: TensorFlow does not flush what it writes.

    Raises:
        CheckpointError: If this process does not see a file, or another size.
        OSError: If a file cannot be read or flushed.
    """
    _wait_until_visible(directory, sizes)
    records = {}
    for name in sizes:
        atomic_files.flush(directory / name)
        records[name] = FileRecord.of(directory / name)
    return records


def _wait_until_visible(directory: Path, sizes: Mapping[str, int | None]) -> None:
    end = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    while True:
        # Lists the directory instead of looking each file up: network file systems cache that a file is missing.
        present = set(os.listdir(directory))
        missing = [name for name, size in sizes.items() if name not in present or not _has(directory / name, size)]
        if not missing:
            return
        if time.monotonic() > end:
            visible_file = (
                f"{missing[0]} of {(directory / missing[0]).stat().st_size} bytes" if missing[0] in present else ""
            )
            raise CheckpointError(
                "This process does not see what a worker has written into a checkpoint. Received: "
                f"{visible_file or f'no {missing[0]}'} in {str(directory)!r} after {_VISIBLE_WITHIN_SECONDS:g} s. "
                f"Expected: {sizes[missing[0]] or 'some'} bytes, on a file system that all workers share. Mount one on "
                "all hosts, and pass its path to FailureRecovery. Earlier checkpoints are intact."
            )
        time.sleep(_PAUSE_SECONDS)


def _has(path: Path, size: int | None) -> bool:
    return size is None or path.stat().st_size == size
