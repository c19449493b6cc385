"""Finds the checkpoint from which all workers resume."""

import logging
import time

from tfdist.checkpoint import Checkpoint, CheckpointError, HostError, OtherFormatError, TrainingStore

_TIMEOUT_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
_log = logging.getLogger("tfdist")


class NoneCompleteError(CheckpointError):
    """Checkpoints were found, and none of them is complete."""


def choose_checkpoint(store: TrainingStore, *, of_loop: bool = False) -> Checkpoint | None:
    """Returns the newest complete checkpoint, None if nothing was saved yet. Called on the chief.

    Logs which checkpoints it skips, and removes unfinished saves. `of_loop`: of a custom loop, not of `fit`.

    Raises:
        CheckpointError: If no checkpoint is complete, or one cannot be read now, or it is of the other kind. Nothing is
            removed then.
    """
    checkpoint, skipped = store.newest()
    if checkpoint is None and skipped:
        raise NoneCompleteError(
            f"None of the checkpoints is complete. Received: {'; '.join(skipped)}, in {store.location!r}. "
            "Expected: a complete one, or a directory without checkpoints. Repair or mount the disk, or copy the files "
            "there again; for a new training, move this directory away or choose another one. Nothing was removed."
        )
    if checkpoint is not None and bool(checkpoint.metadata.get("of_loop")) != of_loop:
        saved, expected = ("`fit`", "a custom loop") if of_loop else ("a custom loop", "`fit`")
        raise CheckpointError(
            f"The checkpoints of `fit` and of custom loops differ. Received: those of {saved}, in {store.location!r}. "
            f"Expected: those of {expected}. Use another directory. Nothing was removed."
        )
    for reason in skipped:
        _log.warning("FailureRecovery skips a checkpoint: %s", reason)
    store.remove_unfinished()
    return checkpoint


def open_chosen_checkpoint(store: TrainingStore, sequence: int, rank: int) -> Checkpoint:
    """Opens the checkpoint that the chief chose, on any worker.

    Other workers than the chief retry for 10 s, because a network file system may show them an old directory.

    Raises:
        CheckpointError: If it is not complete as this worker sees it.
    """
    end = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            return store.open(sequence)
        except (OtherFormatError, HostError):
            raise
        except CheckpointError as error:
            if rank == 0:
                raise
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"Worker {rank} cannot read the checkpoint that the chief has chosen: {error}. Expected: a "
                    "directory on a file system that all workers share. Mount one, and pass its path to "
                    "FailureRecovery."
                ) from error
        time.sleep(_PAUSE_SECONDS)
        store.refresh()
