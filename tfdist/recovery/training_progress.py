"""Counts of steps and epochs from which a training resumes."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TrainingProgress:
    """Counts of a training, equal on all workers.

    Attributes:
        step: Training steps since the training began, over all epochs and restarts; with accumulation, micro-steps.
        epoch: The current epoch, or the next one between two epochs, from 0.
        next_step: The next step of that epoch, from 0.
        stopped: Whether a callback has ended the training before its last epoch.
        requested_epochs: How many epochs `fit` was asked for when the training ended; None before its end.

    >>> progress = TrainingProgress().after_batch(0).after_batch(1)
    >>> progress.step, progress.next_step, progress.after_epoch()
    (2, 2, TrainingProgress(step=2, epoch=1, next_step=0, stopped=False, requested_epochs=None))
    >>> progress.after_batch(5).step, progress.after_epoch().after_batch(1).step  # four and two steps per execution
    (6, 4)
    >>> stopped = progress.after_epoch().finished(stopped=True, requested_epochs=5)
    >>> stopped.is_complete(5), stopped.is_complete(6)
    (True, False)
    """

    step: int = 0
    epoch: int = 0
    next_step: int = 0
    stopped: bool = False
    requested_epochs: int | None = None

    def in_epoch(self, epoch: int) -> "TrainingProgress":
        """Returns the progress when `epoch` begins or resumes."""
        return self if epoch == self.epoch else replace(self, epoch=epoch, next_step=0)

    def after_batch(self, batch: int) -> "TrainingProgress":
        """Returns the progress after batch `batch` of the epoch; with several steps per execution, the last of them."""
        return replace(self, step=self.step + batch + 1 - self.next_step, next_step=batch + 1)

    def after_epoch(self) -> "TrainingProgress":
        """Returns the progress at the end of the epoch."""
        return replace(self, epoch=self.epoch + 1, next_step=0)

    def finished(self, *, stopped: bool, requested_epochs: int) -> "TrainingProgress":
        """Returns the progress at the end of a training of `requested_epochs` epochs."""
        return replace(self, stopped=stopped, requested_epochs=requested_epochs)

    def is_complete(self, epochs: int) -> bool:
        """Returns whether nothing remains to train of `epochs` epochs."""
        was_stopped = self.stopped and (self.requested_epochs is None or epochs <= self.requested_epochs)
        return was_stopped or self.epoch >= epochs

    def resumed(self) -> "TrainingProgress":
        """Returns the progress of a training that resumes, also of one that ended and is asked for more epochs."""
        return replace(self, stopped=False, requested_epochs=None)
