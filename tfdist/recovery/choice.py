"""Which checkpoint a training goes on from: the chief chooses it, all others open the same."""

import logging
import os
import time

from tfdist.checkpoint import Checkpoint, CheckpointError, CheckpointStore, OtherFormatError

_PATIENCE_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
_log = logging.getLogger("tfdist")


def choose(store: CheckpointStore) -> Checkpoint | None:
    """The newest whole checkpoint, `None` if nothing was saved yet; on the chief. Logs what it passes over.

    Raises:
      CheckpointError: there are checkpoints, and none is whole; or one cannot be read now. Nothing was removed.
    """
    checkpoint, passed_over = store.newest()
    if checkpoint is None and passed_over:
        raise CheckpointError(
            f"None of the checkpoints is whole. Received: {'; '.join(passed_over)}, in {str(store.directory)!r}. "
            "Expected: one that is whole, or a directory without checkpoints. Repair or mount the disk, or copy them "
            "there again; to begin anew, move this directory away or name another one. Nothing was removed."
        )
    for reason in passed_over:
        _log.warning("FailureRecovery passes over a checkpoint: %s", reason)
    store.clean()
    return checkpoint


def open_chosen(store: CheckpointStore, sequence: int, rank: int) -> Checkpoint:
    """Opens the checkpoint that the chief has chosen, on the chief or another worker.

    A network file system may tell another worker for some time what it knew before, so that one looks again.

    Raises:
      CheckpointError: it is not whole, as this worker sees it.
    """
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return store.open(sequence)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            if rank == 0:
                raise
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"Worker {rank} cannot read the checkpoint that the chief has chosen: {error}. Expected: a "
                    "directory on a file system that all workers share. Mount one, and give its path to "
                    "FailureRecovery."
                ) from error
        time.sleep(_PAUSE_SECONDS)
        _look_anew(store)


def _look_anew(store: CheckpointStore) -> None:
    """Lists the directory, which has a network file system ask its server what there is."""
    try:
        os.listdir(store.directory)
    except OSError as error:
        _log.debug("%s cannot be listed: %s", store.directory, error)
