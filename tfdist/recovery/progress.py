"""How far a training has come."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Progress:
    """Counts of a training, equal on all workers.

    Attributes:
      step: training steps done since the training began, over all epochs and restarts; micro-steps, with accumulation.
      epoch: the epoch that runs, or the next one between two, from 0.
      next_step: the step of that epoch that comes next, from 0.
      stopped: whether a callback has ended the training before its last epoch.
      asked_epochs: how many epochs `fit` was asked for then; `None` while it is not over.

    >>> progress = Progress().after_batch(0).after_batch(1)
    >>> progress.step, progress.next_step, progress.after_epoch()
    (2, 2, Progress(step=2, epoch=1, next_step=0, stopped=False, asked_epochs=None))
    >>> progress.after_batch(5).step, progress.after_epoch().after_batch(1).step  # four and two steps in one execution
    (6, 4)
    >>> stopped = progress.after_epoch().finished(stopped=True, asked_epochs=5)
    >>> stopped.is_complete(5), stopped.is_complete(6)
    (True, False)
    """

    step: int = 0
    epoch: int = 0
    next_step: int = 0
    stopped: bool = False
    asked_epochs: int | None = None

    def in_epoch(self, epoch: int) -> "Progress":
        """At the beginning of `epoch`, or where it goes on."""
        return self if epoch == self.epoch else replace(self, epoch=epoch, next_step=0)

    def after_batch(self, batch: int) -> "Progress":
        """After batch number `batch` of the epoch; with several steps an execution, the last of them."""
        return replace(self, step=self.step + batch + 1 - self.next_step, next_step=batch + 1)

    def after_epoch(self) -> "Progress":
        """At the end of the epoch."""
        return replace(self, epoch=self.epoch + 1, next_step=0)

    def finished(self, *, stopped: bool, asked_epochs: int) -> "Progress":
        """At the end of a training of `asked_epochs` epochs, which a callback may have ended before."""
        return replace(self, stopped=stopped, asked_epochs=asked_epochs)

    def is_complete(self, epochs: int) -> bool:
        """Whether nothing is left to train of `epochs` epochs."""
        was_stopped = self.stopped and (self.asked_epochs is None or epochs <= self.asked_epochs)
        return was_stopped or self.epoch >= epochs

    def going_on(self) -> "Progress":
        """Where a training goes on, also one that was over when it was asked for fewer epochs."""
        return replace(self, stopped=False, asked_epochs=None)
