"""Takes a snapshot of the training between two steps and writes it to the checkpoint store in the background."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tfdist.checkpoint import BackgroundWriter, CheckpointStore
from tfdist.data_position.resumable_iterator import ResumableIterator
from tfdist.recovery.training_state import TrainingProgress, TrainingState
from tfdist.recovery.worker_coordination import WorkerCoordination


class CheckpointSaver:
    """Saves the checkpoints of one `fit`. Every worker has one and calls it after the same steps."""

    def __init__(
        self,
        state: TrainingState,
        iterator: ResumableIterator,
        store: CheckpointStore,
        writer: BackgroundWriter,
        coordination: WorkerCoordination,
        attempt: str,
        next_sequence: int,
        drawn: Mapping[str, Any],
    ) -> None:
        self._state, self._iterator = state, iterator
        self._store, self._writer, self._coordination = store, writer, coordination
        self._attempt, self._next_sequence, self._drawn = attempt, next_sequence, drawn

    def save(
        self,
        progress: TrainingProgress,
        logs: Mapping[str, Any] | None,
        learning_rates: list[float | None],
        on_written: Callable[[int, int], object] | None,
        *,
        background: bool,
    ) -> float:
        """Takes a snapshot and starts to write it, after waiting for the previous write.

        `logs` are those of the last step, None between epochs. `on_written` is called on the chief with sequence number
        and step when the checkpoint is complete.

        Returns:
            For how many seconds the training stalled.

        Raises:
            CheckpointError: If the previous checkpoint, or this one in the foreground, could not be written.
        """
        sequence, rank, num_workers = self._next_sequence, self._coordination.rank, self._coordination.num_workers
        metadata = {
            "progress": asdict(progress),
            "step": progress.step,
            "epoch": progress.epoch,
            "learning_rates": learning_rates,
            "drawn": dict(self._drawn),
        }
        self._state.wait_for_steps()
        started = time.perf_counter()
        position = self._iterator.position(progress.next_step, logs)
        self._writer.wait()  # the next snapshot overwrites what it writes
        snapshot = self._state.snapshot({"position": position.to_json()}, is_chief=rank == 0)
        self._next_sequence += 1

        def write() -> None:
            snapshot.finish()
            self._store.save(
                sequence,
                self._attempt,
                rank=rank,
                num_ranks=num_workers,
                rank_shard=snapshot.rank,
                shared_shard=snapshot.shared,
                metadata=metadata,
                worker_files=snapshot.worker_files,
            )
            if on_written is not None and rank == 0:  # the chief's write ends after those of all ranks
                on_written(sequence, progress.step)

        self._writer.submit(write)
        if not background:
            self._writer.wait()
        return time.perf_counter() - started
