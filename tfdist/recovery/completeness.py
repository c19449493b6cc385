"""A directory whose training is complete: said every time, as a loop of trainings in one directory trains but once."""

from typing import Any

from tfdist.recovery.notices import warn
from tfdist.recovery.progress import Progress


def tell_of_completeness(progress: Progress, epochs: int, directory: Any) -> None:
    """Warns that `fit` trains nothing.

    Args:
      progress: of the checkpoint.
      epochs: how many `fit` was asked for.
      directory: of the checkpoints.
    """
    how = "which a callback has ended by stop_training" if progress.stopped else "to its end"
    warn(
        f"Nothing is trained, as the training in {str(directory)!r} is complete. Received: epochs={epochs}, and a "
        f"training of {progress.epoch} epochs, {how}; the model has its weights now. Expected: more epochs, to go on "
        "with it, or another directory, to begin anew: each fold, phase or setting is a training of its own."
    )
