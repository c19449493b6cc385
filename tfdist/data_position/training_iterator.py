"""The training data of the running `fit`, as callbacks see it."""

from typing import Any

from tfdist.data_position.resumable_iterator import ResumableIterator
from tfdist.keras_internals.running_fit import RunningFit, running_fit


def training_iterator(model: Any) -> ResumableIterator:
    """Returns the training data of the running `fit` of `model`. Call this in `on_train_begin` or later.

    The first call of a `fit` warns about data whose order another process cannot repeat.

    Raises:
        RuntimeError: If no `fit` of `model` runs in this thread, or it began before `patch_epoch_iterator`.
    """
    fit = _running_fit(model)
    iterator: ResumableIterator = fit.iterator
    iterator.track_position(fit)
    return iterator


def start_at_epoch(model: Any, epoch: int | None) -> None:
    """Makes the running `fit` of `model`, and no later one, begin with `epoch`. Call this in `on_train_begin`.

    With epoch 0 or `None`, `fit` begins with its `initial_epoch`.

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
