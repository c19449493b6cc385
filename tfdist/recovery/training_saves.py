"""The checkpoints of one `fit`, or of one custom loop: the one from which it resumes, and its saves."""

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from tfdist.checkpoint import Checkpoint, CheckpointError, RemoteStoreError
from tfdist.checkpoint.background_writer import create_writer
from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.host_storage.host_store import HostStore
from tfdist.recovery.preemption import PreemptionHandler, exit_process
from tfdist.recovery.recovery_warnings import warn_not_saved
from tfdist.recovery.resume import open_chosen_checkpoint
from tfdist.recovery.storage_tiers import StorageTiers
from tfdist.recovery.training_state import TrainingState
from tfdist.recovery.worker_coordination import Coordination, WorkerCoordination

Json = dict[str, Any]


def print_line(message: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


class TrainingSaves:
    """Finds the checkpoint from which all workers resume, and saves in the background, on all workers alike.

    Args:
        tiers: Where to save.
        coordination: The agreement of the workers.
        state: What is saved.
        background: Whether to write in the background.
        on_end: Registers a function that is called when the training has ended, in whatever way.
        of_loop: Whether the checkpoints are those of a custom loop, and not of `fit`.

    Attributes:
        attempt: A name of this attempt that no other has.
        first_sequence: The number of its first checkpoint.
        restored_from: What is said of the place of the checkpoint that was chosen, if that is not the usual one.
        report: Called with the number and the step of each checkpoint that this worker has committed, if not None.
    """

    def __init__(
        self,
        tiers: StorageTiers,
        coordination: Coordination,
        state: TrainingState,
        *,
        background: bool,
        on_end: Callable[[Callable[[], object]], object],
        of_loop: bool = False,
    ) -> None:
        self._tiers, self._coordination, self._state = tiers, coordination, state
        self._background, self._of_loop, self._on_end = background, of_loop, on_end
        self._writer = create_writer()
        self._is_locked = False
        self._next_sequence = self.first_sequence = 0
        self._committed: Any = None
        self.attempt = self.restored_from = ""
        self.report: Callable[[int, int], None] | None = None

    def choose(self) -> Checkpoint | None:
        """Returns the checkpoint from which all workers resume, as the chief decides; None for a new training.

        Raises:
            CheckpointError: None is complete, or this worker cannot read it, or another process trains in the store.
        """
        sequence, self.attempt, is_in_memory = self._coordination.decide("resume", self._choose)
        store = self._tiers.chosen(is_in_memory=is_in_memory)
        if sequence is None:
            return None
        self.restored_from = ", from memory" if is_in_memory else ""
        checkpoint = open_chosen_checkpoint(store, sequence, self._coordination.rank)
        self.join(self.attempt, sequence + 1)
        return checkpoint

    def join(self, attempt: str, first_sequence: int) -> None:
        """Makes this worker save in the attempt of others."""
        self.attempt = attempt
        self.first_sequence = self._next_sequence = first_sequence

    def save(
        self,
        progress: Any,
        metadata: Json,
        rank_metadata: Callable[[], Json],
        *,
        model: Any = None,
        to_memory: bool = False,
        is_last: bool = False,
        must_succeed: bool = False,
    ) -> float | None:
        """Takes a snapshot, after waiting for the previous write, and starts to write it. All workers call this.

        An object store that does not answer is an error if this save `must_succeed`, else a warning: the next may.
        So is a failure to write to memory.

        Args:
            progress: What `say_preempted` gets after it.
            metadata: What `tfdist checkpoints` shows, equal on all workers, as JSON; with "step".
            rank_metadata: Returns what belongs to this worker, as JSON, after all steps have ended.
            model: The model that `fit` trains.
            to_memory: Whether to save to the memory of the hosts only.
            is_last: Whether all workers leave the training after it.
            must_succeed: Whether a store that does not answer is an error.

        Returns:
            For how many seconds the training has stalled; None if this worker does not save.
        """
        rank, num_workers = self._coordination.rank, self._coordination.num_workers
        saving = self._coordination.begin_save(model, is_last=is_last)
        if saving is None:
            return None
        is_chief, step = saving.chief == rank, metadata["step"]
        store = self._tiers.memory if to_memory else self._tiers.disk
        assert store is not None
        sequence = self._coordination.sequence_of_save(self.first_sequence, self._next_sequence)
        self._state.wait_for_steps()
        started = time.perf_counter()
        own = rank_metadata()
        self._writer.wait()  # the next snapshot overwrites what it writes
        writes_shared = is_chief or (isinstance(store, HostStore) and store.leads)
        snapshot = self._state.snapshot(own, is_chief=writes_shared)
        self._next_sequence = sequence + 1
        if is_chief and not self._is_locked:
            with contextlib.suppress(RemoteStoreError):  # the save takes it, or fails likewise
                self._lock(take_over=True)

        def write() -> None:
            snapshot.finish()
            try:
                saved = store.save(
                    sequence,
                    self.attempt,
                    rank=rank,
                    num_ranks=num_workers,
                    rank_shard=snapshot.rank,
                    shared_shard=snapshot.shared,
                    metadata={**metadata, "of_loop": True} if self._of_loop else metadata,
                    worker_files=snapshot.worker_files,
                    saving=saving,
                )
            except CheckpointError as error:
                if must_succeed or not (to_memory or isinstance(error, RemoteStoreError)):
                    raise
                warn_not_saved(step, error)
                return
            if saved is None:  # not the chief, or given up
                return
            self._committed = progress
            if self.report is not None:  # the chief's write ends after those of all ranks
                self.report(sequence, step)

        self._writer.submit(write)
        if not self._background:
            self._writer.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Waits for what is being written.

        Raises:
            CheckpointError: It could not be written.
        """
        self._writer.wait()

    def drain(self) -> None:
        """Waits for what is being written, and logs its error."""
        self._writer.drain()

    def exit_preempted(
        self,
        preemption: PreemptionHandler,
        callbacks: Iterable[Any],
        progress: Any,
        step: int,
        say: Callable[[str], None],
    ) -> None:
        """Ends this process after a last save, with the exit code of a preemption. All workers call this."""
        assert isinstance(self._coordination, WorkerCoordination)
        self._writer.wait()
        self._coordination.wait_to_exit()  # the chief has committed
        self.say_preempted(progress, step, say)
        preemption.mark_exiting()
        exit_process(PREEMPTED_EXIT_CODE, callbacks, is_alone=self._coordination.num_workers == 1)

    def say_preempted(self, progress: Any, step: int, say: Callable[[str], None]) -> None:
        """Says whether the last save, of this progress, is committed."""
        saved = "saved" if self._committed == progress else "not saved"
        say(f"preempted: {saved} after step {step}; exit code {PREEMPTED_EXIT_CODE}")

    def _choose(self) -> tuple[int | None, str, bool]:
        """Returns the checkpoint from which to resume, a unique name of this attempt, and whether it is in memory."""
        self._lock()
        self._state.check_workers_see(self._tiers.disk)
        sequence, is_in_memory = self._tiers.choose(of_loop=self._of_loop)
        return sequence, secrets.token_hex(8), is_in_memory

    def _lock(self, *, take_over: bool = False) -> None:
        writer, lock = self._writer, self._tiers.disk.lock()
        if take_over:
            lock.take_over()
        else:
            lock.acquire()
        self._is_locked = lock.is_held  # a frozen earlier chief may hold it until it ends

        def release() -> None:
            writer.drain()
            lock.release()

        self._on_end(release)
