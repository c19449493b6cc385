"""`CheckpointStore`: saves, finds, lists and removes the checkpoints of a training in one directory."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tfdist.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    directory_name,
    inspect_checkpoint,
    inspect_unfinished,
    list_checkpoints,
    list_unfinished,
)
from tfdist.checkpoint.direct_file import write_direct
from tfdist.checkpoint.directory_lock import DirectoryLock
from tfdist.checkpoint.errors import CorruptCheckpointError, explained
from tfdist.checkpoint.shard import Json, Shard, ShardReader, read_shard
from tfdist.checkpoint.sharded_save import EARLIER_INTACT, SavingRanks, ShardedSave, WorkerFiles
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import check_seconds, check_whole_number

_log = logging.getLogger("tfdist")


class CheckpointStore:
    """The directory that holds the checkpoints of a training. Only one training at a time may save there.

    Args:
        directory: The first save creates it. All ranks must see the same directory.
        keep: How many complete checkpoints to keep at least. A save removes checkpoints older than the `keep` newest
            that this object has written or verified: after a restart there may be up to `2 * keep - 1`, and a corrupt
            one never counts.
        peer_timeout_seconds: How long the chief, rank 0 unless others save, waits for the files of the other ranks.

    Attributes:
        directory: As given.
        location: The same, for messages.
        peer_timeout_seconds: As given.

    Raises:
        ValueError: If an argument is invalid.
    """

    _read_shard: ShardReader = staticmethod(read_shard)

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3, peer_timeout_seconds: float = 60.0) -> None:
        check_whole_number("keep", keep, at_least=1)
        check_seconds("peer_timeout_seconds", peer_timeout_seconds)
        self.directory = _on_a_file_system(directory)
        self.location = str(self.directory)
        self._keep = keep
        self.peer_timeout_seconds = peer_timeout_seconds
        self._known_complete: set[int] = set()

    def lock(self) -> DirectoryLock:
        """Returns a lock on the directory."""
        return DirectoryLock(self.directory)

    def refresh(self) -> None:
        """Lists the directory, so that a network file system asks its server for the present content."""
        try:
            os.listdir(self.directory)
        except OSError as error:
            _log.debug("%s cannot be listed: %s", self.directory, error)

    def save(
        self,
        sequence: int,
        attempt: str,
        *,
        rank: int,
        num_ranks: int,
        rank_shard: Shard,
        shared_shard: Shard | None,
        metadata: Json,
        worker_files: WorkerFiles | None = None,
        saving: SavingRanks | None = None,
    ) -> Checkpoint | None:
        """Saves a checkpoint. Every rank that saves calls it with the same `sequence`, `attempt` and `num_ranks`.

        Args:
            sequence: The checkpoint's number, larger than that of the restored checkpoint. A complete checkpoint is
                never replaced, a corrupt one of the same number is.
            attempt: A string that is unique to a start of the program: letters, digits, ".", "_", "-".
            rank: The rank of this process.
            num_ranks: The number of ranks.
            rank_shard: What differs between ranks. The arrays must not change until this method returns.
            shared_shard: What is equal on all ranks, from the chief; None from the others.
            metadata: JSON for the manifest, readable without reading tensors; that of the chief is stored.
            worker_files: Files that workers write into the checkpoint for the chief.
            saving: The ranks that save, the same on all of them, if some were lost. By default all; rank 0 is the
                chief.

        Returns:
            The checkpoint on the chief, complete and on disk. None on other ranks, and if `saving` lets the chief give
            it up.

        Raises:
            CheckpointError: If it cannot be written; the message contains the remedy. Earlier checkpoints are intact,
                and the files of this one are removed.
            ValueError: If an argument is invalid.
        """
        reused = self._reused_bytes()
        save = ShardedSave(self.directory, sequence, attempt, rank, num_ranks, saving, self._write, reused)
        with explained(f"Checkpoint {sequence} could not be written", self.directory, EARLIER_INTACT):
            saved = save.run(
                rank_shard,
                shared_shard,
                metadata,
                peer_timeout_seconds=self.peer_timeout_seconds,
                worker_files=worker_files,
            )
        if saved is not None:
            self._known_complete.add(sequence)
            self._remove_old(sequence)
        return saved

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Finds the newest complete checkpoint and verifies all its checksums.

        Returns:
            The checkpoint, or None; and the reasons why newer ones were skipped.

        Raises:
            CheckpointError: If the directory or a newer checkpoint cannot be read, or has another format.
        """
        skipped = []
        with explained("The checkpoints could not be read", self.directory):
            for sequence, path in list_checkpoints(self.directory).items():
                try:
                    checkpoint = Checkpoint(path, read=self._read_shard)
                except CorruptCheckpointError as error:
                    skipped.append(f"{path.name}: {error}")
                else:
                    self._known_complete.add(sequence)
                    return checkpoint, skipped
        return None, skipped

    def open(self, sequence: int) -> Checkpoint:
        """Opens one checkpoint and verifies all its checksums.

        Raises:
            CheckpointError: If it is not complete; the message says why.
        """
        path = self.directory / directory_name(sequence)
        with explained(f"Checkpoint {sequence} could not be read", self.directory):
            try:
                checkpoint = Checkpoint(path, read=self._read_shard)
            except CorruptCheckpointError as error:
                present = ", ".join(map(str, list_checkpoints(self.directory))) or "none"
                raise CorruptCheckpointError(
                    f"Checkpoint {sequence} is corrupt. Received: {error}, in {str(path)!r}. Expected: the files that "
                    f"were written. Checkpoints in the directory: {present}; tfdist checkpoints DIR --verify shows "
                    "which are complete."
                ) from error
        self._known_complete.add(sequence)
        return checkpoint

    def list_checkpoints(self, *, verify_checksums: bool = False) -> list[CheckpointInfo]:
        """Lists the checkpoints and unfinished saves of the directory, oldest first.

        Args:
            verify_checksums: Whether to compute all checksums, which reads every byte, or only to compare sizes.

        Raises:
            CheckpointError: If the directory or a checkpoint in it cannot be read.
        """
        with explained("The checkpoints could not be read", self.directory):
            inspected = [
                inspect_checkpoint(sequence, path, verify_checksums=verify_checksums)
                for sequence, path in list_checkpoints(self.directory).items()
            ]
            entries = [
                # A running training may have removed a checkpoint while it was inspected.
                *(info for info in inspected if info.status != "corrupt" or os.path.lexists(info.path)),
                *(inspect_unfinished(sequence, path) for sequence, _, path in list_unfinished(self.directory)),
            ]
        return sorted(entries, key=lambda info: (info.sequence, info.path))

    def remove_unfinished(self, current_attempt: str | None = None) -> None:
        """Removes unfinished saves of earlier attempts. Logs what cannot be removed.

        Args:
            current_attempt: The saves of this attempt stay; other ranks may have begun them.

        Raises:
            CheckpointError: If the directory cannot be read.
        """
        with explained("The checkpoints could not be read", self.directory):
            unfinished = list_unfinished(self.directory)
        for _, attempt, path in unfinished:
            if attempt != current_attempt:
                _try_to_remove(path, atomic_files.remove_leftover)

    def prune(self, keep: int, *, dry_run: bool = False) -> list[Path]:
        """Removes unfinished saves and all but the `keep` newest complete checkpoints, whose checksums it verifies.

        Corrupt checkpoints are removed unless none is complete. Those of another format stay. No process may save in
        the directory meanwhile.

        Args:
            keep: How many to keep, at least 1.
            dry_run: Whether to remove nothing.

        Returns:
            What was removed, or would be.

        Raises:
            CheckpointError: If something cannot be read, in which case nothing is removed, or cannot be removed.
            ValueError: If `keep` is invalid.
        """
        check_whole_number("keep", keep, at_least=1)
        with explained("The checkpoints could not be pruned", self.directory):
            old: list[Path] = []
            corrupt: list[Path] = []
            num_kept = 0
            for sequence, path in list_checkpoints(self.directory).items():
                status = inspect_checkpoint(sequence, path, verify_checksums=num_kept < keep).status
                if status == "corrupt":
                    corrupt.append(path)
                elif status == "complete" and num_kept == keep:
                    old.append(path)
                elif status == "complete":
                    num_kept += 1
            removed = [*old, *corrupt] if num_kept else []
            unfinished = [path for _, _, path in list_unfinished(self.directory)]
            if not dry_run:
                for path in removed:
                    atomic_files.remove(path)
                for path in unfinished:
                    atomic_files.remove_leftover(path)
        return sorted([*removed, *unfinished])

    def _write(self, path: Path, parts: Iterable[npt.NDArray[Any]]) -> str:
        """Writes a file of a save, and returns its checksum."""
        return write_direct(path, parts)

    def _reused_bytes(self) -> int:
        """Returns how many bytes a save writes to where earlier files were."""
        return 0

    def _discard(self, path: Path) -> None:
        """Removes a checkpoint."""
        atomic_files.remove(path)

    def _remove_old(self, sequence: int) -> None:
        """Removes checkpoints older than the `keep` newest complete ones, and unfinished saves before `sequence`."""
        try:
            present, unfinished = list_checkpoints(self.directory), list_unfinished(self.directory)
        except OSError as error:
            _log.warning("Older checkpoints could not be listed: %s", error)
            return
        kept_sequences = sorted(self._known_complete & present.keys())[-self._keep :]
        self._known_complete = set(kept_sequences)
        if len(kept_sequences) == self._keep:
            for older, path in present.items():
                if older < kept_sequences[0]:
                    _try_to_remove(path, self._discard)
        for older, _, path in unfinished:
            if older < sequence:
                _try_to_remove(path, atomic_files.remove_leftover)


def _try_to_remove(path: Path, remove: Callable[[Path], None]) -> None:
    try:
        remove(path)
    except OSError as error:
        _log.warning("%s could not be removed: %s", path, error)


def _on_a_file_system(directory: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(directory):
        raise ValueError(
            f"Invalid `directory`: a URL. Received: directory={os.fspath(directory)!r}. Expected: a path on a file "
            "system that all workers share. `open_store` opens an address, as FailureRecovery does."
        )
    return Path(directory)
