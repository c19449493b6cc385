"""The training data of the running `fit`, as callbacks see it: asks for the position and resumes there."""

from collections.abc import Callable, Mapping
from typing import Any

from tfdist.data_position.position import Position
from tfdist.data_position.resumable_iterator import ResumableIterator, ResumeCost
from tfdist.keras_internals.running_fit import RunningFit, running_fit


class TrainingIterator:
    """The training data of a running `fit`."""

    def __init__(self, fit: RunningFit) -> None:
        self._fit = fit
        self._iterator: ResumableIterator = fit.iterator

    @property
    def resume_cost(self) -> ResumeCost:
        """What `resume_at` has cost so far; complete once the first batch has begun."""
        return self._iterator.resume_cost

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the batches; `None` if unknown."""
        return self._iterator.element_spec

    def on_fit_end(self, function: Callable[[], object]) -> None:
        """Calls `function` when this `fit` ends, also by an exception."""
        self._fit.on_end(function)

    def position(self, next_step: int, logs: Mapping[str, Any] | None = None) -> Position:
        """Returns the position after the steps made so far.

        Args:
            next_step: The next step of the epoch: `batch + 1` in `on_train_batch_end(batch)`, 0 in `on_epoch_end`.
            logs: What `on_train_batch_end` received: numbers and arrays. Required if this was the epoch's last step
                and a custom `train_step` logs anything other than its metrics.
        """
        return self._iterator.position(next_step, logs)

    def resume_at(self, position: Position, *, replay: bool = False, same_workers: bool = True) -> None:
        """Makes the first epoch of this `fit` resume at `position`. Call this once, in `on_train_begin`.

        `start_at_epoch` sets the number of that epoch.

        May run the data's code (a PyDataset's hooks, batches drawn again), so restore the random generators of
        Python, NumPy and Keras afterwards.

        Args:
            position: Where to resume.
            replay: Whether batches of a Python generator, which cannot be resumed in the middle, may be drawn and
                discarded up to there. The generator must yield the same batches in every run.
            same_workers: Whether the number of workers is the same as when the position was taken. If not, and each
                worker has different data, a warning says what that means.

        Raises:
            ValueError: If the data, or the arguments of `fit`, are not those of the run to resume.
            RuntimeError: If the data cannot be resumed: a generator without `replay`, or data that more iterators
                were created over than before.
        """
        self._iterator.resume_at(position, replay=replay, same_workers=same_workers)
        if position.next_step > 0:
            self._fit.set_epoch_logs(position.logs)


def training_iterator(model: Any) -> TrainingIterator:
    """Returns the training data of the running `fit` of `model`. Call this in `on_train_begin` or later.

    The first call of a `fit` warns about data whose order another process cannot repeat.

    Args:
        model: The Keras model.

    Raises:
        RuntimeError: If no `fit` of `model` runs in this thread, or it began before `patch_epoch_iterator`.
    """
    fit = _running_fit(model)
    fit.iterator.track_position()
    return TrainingIterator(fit)


def start_at_epoch(model: Any, epoch: int | None) -> None:
    """Makes the running `fit` of `model`, and no later one, begin with `epoch`. Call this in `on_train_begin`.

    Args:
        model: The Keras model.
        epoch: The epoch, from 0; with 0 or `None`, `fit` begins with its `initial_epoch`.

    Raises:
        RuntimeError: If no `fit` of `model` runs in this thread, or it began before `patch_epoch_iterator`.
    """
    _running_fit(model).start_at_epoch(epoch)


def _running_fit(model: Any) -> RunningFit:
    fit = running_fit(model)
    if fit is None or not isinstance(fit.iterator, ResumableIterator):
        raise RuntimeError(
            "The training data of a model is known only while `fit` runs. Received: a model "
            f"({getattr(model, 'name', model)!r}) that is not being trained, or whose `fit` began before tfdist "
            "patched Keras. Expected: a call in a callback, in `on_train_begin` or later, and "
            "`patch_epoch_iterator()` before `fit`."
        )
    return fit
