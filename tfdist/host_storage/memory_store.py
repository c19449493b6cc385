"""`MemoryStore`: the checkpoints of a training in the memory of its hosts, which outlives a worker."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tfdist.checkpoint.checkpoint import Checkpoint, list_checkpoints
from tfdist.checkpoint.direct_file import write_direct
from tfdist.checkpoint.errors import CheckpointError
from tfdist.checkpoint.manifest import MANIFEST_FILE
from tfdist.checkpoint.shard import map_shard
from tfdist.host_storage.host_store import HostStore
from tfdist.utils import atomic_files

_PRIVATE = 0o700


class MemoryStore(HostStore):
    """A `HostStore` in a directory of shared memory.

    It has the newest checkpoint, and the files of the one before it, which the next save writes to again: memory that
    is touched for the first time costs several times the copy. A save that is interrupted leaves the newest intact.

    The arrays of a checkpoint that is read are its files, for the same reason. So nothing is written to these again.

    Args:
        directory: The directory, whose parent is that of the run.
        peer_timeout_seconds: How long a worker waits for others.

    Raises:
        CheckpointError: If the directory of the run is not this user's, or cannot be created.
    """

    _read_shard = staticmethod(map_shard)

    def __init__(self, directory: Path, *, peer_timeout_seconds: float = 60.0) -> None:
        super().__init__(directory, keep=1, peer_timeout_seconds=peer_timeout_seconds)
        self._in_use = ""  # the name of the checkpoint whose files are in use
        self._spare = directory / "spare"
        try:
            directory.parent.mkdir(mode=_PRIVATE, exist_ok=True)
            is_own = directory.parent.stat().st_uid == os.getuid()
        except OSError as error:
            raise CheckpointError(
                f"No checkpoint can be kept in memory. Received: {error}. Expected: a directory in shared memory in "
                "which this user may write. Leave memory_every_steps out."
            ) from error
        if not is_own:
            raise CheckpointError(
                f"The memory of this run is another user's. Received: {str(directory.parent)!r}. Expected: a directory "
                "of this user. Start `tfdist run` again, or leave memory_every_steps out."
            )

    def open(self, sequence: int) -> Checkpoint:
        """Opens the checkpoint that the chief has chosen, see `HostStore.open`."""
        checkpoint = super().open(sequence)
        self._in_use = checkpoint.path.name
        return checkpoint

    def clear(self) -> None:
        """Forgets all checkpoints, and uses their memory again. Only the worker that leads its host calls this."""
        for path in list_checkpoints(self.directory).values():
            self._discard(path)
        self.remove_unfinished()
        self._known_complete.clear()

    def remove(self) -> None:
        """Frees the memory of this host."""
        # A worker of this host that begins its next `fit` must not lose there what it writes.
        with contextlib.suppress(OSError):  # the launcher frees the rest
            atomic_files.remove(self.directory)

    def _write(self, path: Path, parts: Iterable[npt.NDArray[Any]]) -> str:
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._spare / path.name, path)
        return write_direct(path, parts, overwrite=True)

    def _reused_bytes(self) -> int:
        total = 0
        for file in self._spare.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another worker uses it already
                total += file.stat().st_size
        return total

    def _discard(self, path: Path) -> None:
        if path.name == self._in_use:
            super()._discard(path)
            return
        (path / MANIFEST_FILE).unlink(missing_ok=True)  # from here on it is no checkpoint
        self._spare.mkdir(exist_ok=True)
        for file in path.iterdir():
            os.replace(file, self._spare / file.name)
        path.rmdir()
