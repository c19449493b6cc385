"""What the checkpoints of a training are saved to: a directory or an object store."""

import os
from pathlib import Path
from typing import Protocol

from tfdist.checkpoint.checkpoint import Checkpoint, CheckpointInfo
from tfdist.checkpoint.checkpoint_store import CheckpointStore
from tfdist.checkpoint.directory_lock import LOCK_TIMEOUT_SECONDS
from tfdist.checkpoint.shard import Json, Shard
from tfdist.checkpoint.sharded_save import SavingRanks, WorkerFiles


class TrainingLock(Protocol):
    """The right to save to a store."""

    @property
    def is_held(self) -> bool:
        """Whether this object has it."""
        ...

    def acquire(self, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
        """Waits for it while another process has it; raises a `CheckpointError` if that has it all the time."""
        ...

    def take_over(self) -> None:
        """Takes it for a worker on which the others have agreed."""
        ...

    def release(self) -> None:
        """Gives it back."""
        ...


class TrainingStore(Protocol):
    """The checkpoints of one training. `CheckpointStore` describes the methods.

    Attributes:
        location: The path or address.
        directory: The path, None if there is none.
        peer_timeout_seconds: How long the chief waits for the files of the other ranks.
    """

    location: str
    peer_timeout_seconds: float

    @property
    def directory(self) -> Path | None:
        """The path, None if there is none."""
        ...

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
        """Saves a checkpoint."""
        ...

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Finds the newest complete checkpoint."""
        ...

    def open(self, sequence: int) -> Checkpoint:
        """Opens one checkpoint."""
        ...

    def list_checkpoints(self, *, verify_checksums: bool = False) -> list[CheckpointInfo]:
        """Lists the checkpoints and unfinished saves, oldest first."""
        ...

    def remove_unfinished(self, current_attempt: str | None = None) -> None:
        """Removes unfinished saves of earlier attempts."""
        ...

    def prune(self, keep: int, *, dry_run: bool = False) -> list[Path]:
        """Removes unfinished saves and all but the newest complete checkpoints."""
        ...

    def lock(self) -> TrainingLock:
        """Returns what gives a process the right to save."""
        ...

    def refresh(self) -> None:
        """Makes what other processes have saved visible."""
        ...


def open_store(location: str | os.PathLike[str], *, keep: int = 3, peer_timeout_seconds: float = 60.0) -> TrainingStore:
    """Returns the store of a directory, or of an address such as `s3://bucket/run`.

    Raises:
        ImportError: If fsspec, or its library for this kind of address, is not installed.
        ValueError: If an argument is invalid.
    """
    text = os.fspath(location)
    if "://" not in text:
        return CheckpointStore(location, keep=keep, peer_timeout_seconds=peer_timeout_seconds)
    from tfdist.checkpoint.remote.remote_store import RemoteStore  # few trainings need it

    return RemoteStore(text, keep=keep, peer_timeout_seconds=peer_timeout_seconds)
