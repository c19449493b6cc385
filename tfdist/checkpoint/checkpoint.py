"""Opens, verifies and lists the checkpoints in a directory: complete, corrupt and unfinished ones."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfdist.checkpoint.errors import CorruptCheckpointError, OtherFormatError, file_errors
from tfdist.checkpoint.manifest import MANIFEST_FILE, SHARED_FILE, Manifest, is_worker_file, rank_file
from tfdist.checkpoint.shard import Json, Shard, ShardReader, read_shard
from tfdist.utils.atomic_files import REMOVED_PREFIX

CHECKPOINT_PREFIX, UNFINISHED_PREFIX = "ckpt-", ".unfinished-"
_CHECKPOINT = re.compile(re.escape(CHECKPOINT_PREFIX) + r"(\d{10})")
_UNFINISHED = re.compile(
    rf"(?:{re.escape(UNFINISHED_PREFIX)}|{re.escape(REMOVED_PREFIX + CHECKPOINT_PREFIX)})(\d{{10}})-(.+)"
)


def directory_name(sequence: int) -> str:
    """Returns the name of a checkpoint's directory.

    >>> directory_name(7)
    'ckpt-0000000007'
    """
    return f"{CHECKPOINT_PREFIX}{sequence:010d}"


def unfinished_name(sequence: int, attempt: str) -> str:
    """Returns the name of the directory of a save in progress.

    >>> unfinished_name(7, "a")
    '.unfinished-0000000007-a'
    """
    return f"{UNFINISHED_PREFIX}{sequence:010d}-{attempt}"


class Checkpoint:
    """A complete checkpoint; with own disks (`Manifest.hosts`), what the directory of one host has of it.

    Attributes:
        path: The directory.
        sequence: The sequence number.
        num_ranks: The number of ranks of the training that wrote it.
        saved_ranks: Those of them that have saved their part: all, unless some were lost in an elastic training.
        metadata: JSON that the writer stored in the manifest, readable without reading tensors.
        saved_at: When it was saved, in seconds since 1970.
        size_bytes: The size of its files without the manifest.
    """

    def __init__(
        self,
        path: Path,
        *,
        verify_checksums: bool = True,
        written: Manifest | None = None,
        read: ShardReader = read_shard,
    ) -> None:
        """Opens a checkpoint.

        Args:
            path: The directory.
            verify_checksums: Whether to compute all checksums, which reads every byte, or only to compare sizes.
            written: The manifest of a checkpoint that this process has just written, of which nothing is read again.
            read: Reads a shard, as `read_shard`.

        Raises:
            CorruptCheckpointError: If it is corrupt. The message says why, without the path of the checkpoint.
            OtherFormatError: If another version of tfdist wrote it in another format.
            OSError: If this user may not read it, or the file system does not respond.
        """
        self.path, self._read_shard = path, read
        self._manifest = read_manifest(path) if written is None else written
        self.sequence = self._manifest.sequence
        self.num_ranks, self.saved_ranks = self._manifest.num_ranks, self._manifest.saved_ranks
        self.metadata: Json = self._manifest.metadata
        self.saved_at = self._manifest.saved_at
        self.size_bytes = sum(record.size_bytes for record in self._manifest.files.values())
        if path.name != directory_name(self.sequence):
            raise CorruptCheckpointError(f"{MANIFEST_FILE} is that of checkpoint {self.sequence}")
        required_files = {SHARED_FILE, *map(rank_file, self.saved_ranks)}
        has_required = bool(self.saved_ranks) and required_files <= set(self._manifest.files)
        if not has_required or not all(map(is_worker_file, set(self._manifest.files) - required_files)):
            raise CorruptCheckpointError(f"{MANIFEST_FILE} does not name the files of {self.num_ranks} ranks")
        self._verified: dict[str, tuple[int, ...]] = {}
        for name in self._manifest.files_here if written is None else ():
            self._check(name, verify_checksums=verify_checksums)

    @property
    def has_all_files(self) -> bool:
        """Whether all its files are in the directory; other hosts may have some."""
        return set(self._manifest.files_here) == set(self._manifest.files)

    def read_shared(self) -> Shard:
        """Reads what is equal on all ranks.

        Raises:
            CorruptCheckpointError: If the file was damaged after this checkpoint was opened.
        """
        return self._read(SHARED_FILE)

    def read_rank(self, rank: int) -> Shard:
        """Reads what one rank saved.

        Raises:
            ValueError: If the checkpoint has no such rank, or that had been lost.
            CorruptCheckpointError: If the file was damaged after this checkpoint was opened.
        """
        if rank not in self.saved_ranks:
            missing_ranks = sorted({*range(self.num_ranks)}.difference(self.saved_ranks))
            but = f", except {', '.join(map(str, missing_ranks))}" if missing_ranks else ""
            raise ValueError(
                f"Checkpoint {self.sequence} has no such rank. Received: {rank}. Expected: 0 to {self.num_ranks - 1}"
                f"{but}, the ranks that wrote it."
            )
        return self._read(rank_file(rank))

    def _read(self, name: str) -> Shard:
        fingerprint = fingerprint_of(self.path / name)
        if not fingerprint or self._verified.get(name) != fingerprint:
            self._check(name, verify_checksums=True)
        return self._read_shard(self.path / name)

    def _check(self, name: str, *, verify_checksums: bool) -> None:
        fingerprint = fingerprint_of(self.path / name)
        self._manifest.files[name].check(self.path / name, verify_checksum=verify_checksums)
        if verify_checksums:
            self._verified[name] = fingerprint


Status = Literal["complete", "corrupt", "other format", "unfinished"]


@dataclass(frozen=True)
class CheckpointInfo:
    """One entry of a listing.

    Attributes:
        sequence: The checkpoint's sequence number.
        path: The directory.
        status: "complete"; "corrupt"; "other format" if another version of tfdist wrote it; "unfinished" for a save
            that is in progress or was interrupted, and for an interrupted removal.
        reason: Why it is not complete, else "".
        size_bytes: The size of the files that exist.
        num_ranks: The number of ranks of the training that wrote it; None unless it is complete, like the following
            two.
        saved_at: When it was saved, in seconds since 1970.
        metadata: JSON that the writer stored.
    """

    sequence: int
    path: Path
    status: Status
    reason: str = ""
    size_bytes: int = 0
    num_ranks: int | None = None
    saved_at: float | None = None
    metadata: Json | None = None


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Returns the directories with a final name by sequence number, newest first. A missing `directory` is empty."""
    paths = {int(match[1]): path for path, match in _matching(directory, _CHECKPOINT)}
    return dict(sorted(paths.items(), reverse=True))


def list_unfinished(directory: Path) -> list[tuple[int, str, Path]]:
    """Returns sequence, attempt ("" for a removal) and path of unfinished saves and removals, oldest first."""
    return sorted(
        (int(match[1]), match[2] if path.name.startswith(UNFINISHED_PREFIX) else "", path)
        for path, match in _matching(directory, _UNFINISHED)
    )


def inspect_checkpoint(sequence: int, path: Path, *, verify_checksums: bool) -> CheckpointInfo:
    """Finds out whether a checkpoint is complete.

    Raises:
        OSError: If this user may not read it, or the file system does not respond.
    """
    size = _size_bytes(path)
    try:
        opened = Checkpoint(path, verify_checksums=verify_checksums)
    except OtherFormatError as error:
        return CheckpointInfo(sequence, path, "other format", str(error), size)
    except CorruptCheckpointError as error:
        return CheckpointInfo(sequence, path, "corrupt", str(error), size)
    return CheckpointInfo(sequence, path, "complete", "", size, opened.num_ranks, opened.saved_at, opened.metadata)


def inspect_unfinished(sequence: int, path: Path) -> CheckpointInfo:
    """Describes an unfinished save or removal."""
    is_removal = path.name.startswith(REMOVED_PREFIX)
    reason = "interrupted removal" if is_removal else "save in progress or interrupted"
    return CheckpointInfo(sequence, path, "unfinished", reason, _size_bytes(path))


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint in a directory.

    Raises:
        CorruptCheckpointError, OtherFormatError, OSError: See `Checkpoint`.
    """
    with file_errors(MANIFEST_FILE):
        content = (path / MANIFEST_FILE).read_bytes()
    return Manifest.from_bytes(content)


def fingerprint_of(path: Path) -> tuple[int, ...]:
    """Returns what changes when a file is written to; empty if the file cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError:  # reading the file raises the error
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    try:
        matches = [(path, pattern.fullmatch(path.name)) for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    return [(path, match) for path, match in matches if match]


def _size_bytes(path: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # a save that has ended, or was removed, since it was listed
        for file in [path, *path.rglob("*")]:
            with contextlib.suppress(FileNotFoundError):
                total += file.lstat().st_size if not file.is_dir() else 0
    return total
