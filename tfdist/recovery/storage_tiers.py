"""Where a training is saved: on a disk or an object store, and before that in the memory of its hosts."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.checkpoint import Checkpoint, TrainingStore, open_store
from tfdist.cluster import MEMORY_VARIABLE
from tfdist.host_storage.host_store import HostStore
from tfdist.host_storage.hosts import gather
from tfdist.host_storage.memory_store import MemoryStore
from tfdist.recovery.host_meeting import check_strategy, meet
from tfdist.recovery.resume import NoneCompleteError, choose_checkpoint
from tfdist.recovery.worker_coordination import Coordination, WorkerCoordination
from tfdist.utils.argument_checks import check_whole_number

_log = logging.getLogger("tfdist")


class StorageTiers:
    """The stores of a training, which have common numbers: the larger one is newer.

    Args:
        disk: The store that outlives the run.
        memory_every_steps: After how many steps to save to the memory of the hosts; None: never.

    Attributes:
        disk: As given.
        memory: The store in memory of the present `fit`; None if there is none.

    Raises:
        ValueError: If an argument is invalid.
    """

    def __init__(self, disk: TrainingStore, memory_every_steps: int | None) -> None:
        if memory_every_steps is not None:
            check_whole_number("memory_every_steps", memory_every_steps, at_least=1)
        self.disk = disk
        self.memory: MemoryStore | None = None
        self._every = memory_every_steps
        self._step = 0

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        shared: bool,
        memory_every_steps: int | None,
        keep: int,
        peer_timeout_seconds: float,
    ) -> "StorageTiers":
        """Returns the stores of a training that saves to a directory or an address; see `FailureRecovery`.

        Raises:
            ImportError: If the library for an address is not installed.
            ValueError: If an argument is invalid.
        """
        open_disk = open_store if shared else HostStore
        return cls(open_disk(directory, keep=keep, peer_timeout_seconds=peer_timeout_seconds), memory_every_steps)

    def begin(
        self, coordination: Coordination, strategy: Any, environ: Mapping[str, str], drain: Callable[[], None]
    ) -> Callable[[], None]:
        """Meets the other workers, if some host has what others need; all workers call this when a `fit` begins.

        Returns:
            A function that ends the meeting, after `drain`, which waits for what is being written.

        Raises:
            ValueError: If the strategy cannot be saved in this way.
            CheckpointError: See `HostStore.meet`.
        """
        ends: list[Callable[[], None]] = []

        def end() -> None:
            while ends:
                ends.pop()()

        self.memory = None
        try:
            if isinstance(self.disk, HostStore):
                check_strategy("shared=False", coordination, strategy)
                ends.append(meet(self.disk, "disk", coordination, strategy))
            if self._every is not None:
                check_strategy(f"memory_every_steps={self._every}", coordination, strategy)
                self.memory = self._store_in_memory(coordination, environ)
            if self.memory is not None:
                ends.append(meet(self.memory, "memory", coordination, strategy))
        except BaseException:
            end()
            raise
        if ends:
            ends.append(drain)  # called first
        return end

    def choose(self, *, of_loop: bool = False) -> tuple[int | None, bool]:
        """Returns the number of the newest complete checkpoint, None if nothing was saved; and whether it is in memory.

        Called on the chief. The disk is not read if what is in memory is newer. `of_loop`: of a custom loop, not of
        `fit`.

        Raises:
            CheckpointError: See `choose_checkpoint`.
        """
        in_memory = self._newest_in_memory()
        if in_memory is not None and in_memory.sequence >= _newest_number(self.disk):
            self.disk.remove_unfinished()
            return in_memory.sequence, True
        try:
            on_disk = choose_checkpoint(self.disk, of_loop=of_loop)
        except NoneCompleteError as error:
            if in_memory is None:
                raise
            _log.warning("The state in memory is restored, since there is nothing newer: %s", error)
            on_disk = None
        if in_memory is not None and (on_disk is None or on_disk.sequence < in_memory.sequence):
            return in_memory.sequence, True
        return (None if on_disk is None else on_disk.sequence), False

    def chosen(self, *, is_in_memory: bool) -> TrainingStore:
        """Returns the store of the checkpoint that was chosen; forgets what is in memory if that is another one."""
        if is_in_memory:
            assert self.memory is not None
            return self.memory
        if self.memory is not None and self.memory.leads:
            self.memory.clear()
        return self.disk

    def wait_until_all_have_read(self, step: int) -> None:
        """Waits until all workers have restored, and counts from a step on.

        Raises:
            CheckpointError: If a worker does not call this.
        """
        self._step = step
        for store in (self.disk, self.memory):
            if isinstance(store, HostStore):
                store.wait_until_all_have_read()

    def is_due(self, step: int) -> bool:
        """Whether to save to memory after a step, the number of steps since the training began."""
        previous, self._step = self._step, step
        return self.memory is not None and self._every is not None and step // self._every != previous // self._every

    def free_memory(self) -> None:
        """Frees the memory: the training has ended, and is saved."""
        if self.memory is not None and self.memory.leads:
            self.memory.remove()

    def _newest_in_memory(self) -> Checkpoint | None:
        if self.memory is None:
            return None
        checkpoint, skipped = self.memory.newest()
        for reason in skipped:
            _log.warning("FailureRecovery skips a checkpoint in memory: %s", reason)
        return checkpoint

    def _store_in_memory(self, coordination: Coordination, environ: Mapping[str, str]) -> MemoryStore | None:
        assert isinstance(coordination, WorkerCoordination)
        folder, timeout = environ.get(MEMORY_VARIABLE, ""), self.disk.peer_timeout_seconds
        folders = gather(coordination, "memory of the run", folder, timeout)
        if not all(folders):
            if coordination.is_chief:
                without = ", ".join(str(rank) for rank, path in enumerate(folders) if not path)
                _log.warning(
                    "Nothing is saved to the memory of the hosts. Received: memory_every_steps=%d, and no memory that "
                    "outlives worker %s. Expected: workers that `tfdist run` has started, on hosts with /dev/shm.",
                    self._every,
                    without,
                )
            return None
        return MemoryStore(memory_of(folder, self.disk.location), peer_timeout_seconds=timeout)


def memory_of(folder: str, location: str) -> Path:
    """Returns the directory, in that of the run, for the training that is saved to a location."""
    return Path(folder, hashlib.sha256(os.path.abspath(location).encode()).hexdigest()[:16])


def _newest_number(store: TrainingStore) -> int:
    """Returns the largest number in a store, without reading its files; -1 if there is none."""
    if isinstance(store, HostStore):
        return store.newest_number()
    return max((info.sequence for info in store.list_checkpoints() if info.status == "complete"), default=-1)
