"""The learning rates that a run begins with, which a checkpoint's replace: said where that changes something."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.keras_internals.model_state import optimizers_of
from tfdist.keras_internals.optimizer_state import OptimizerState
from tfdist.recovery.notices import warn

Rates = list[float | None]
_known: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that this process has trained with


class BeginningRates:
    """The learning rates that a run began with: those of the program, before callbacks have changed any.

    Where a process goes on with the optimizers that it has trained with, as in a notebook, the rates may be callbacks'.

    Attributes:
      values: the rates, as a checkpoint keeps them.
    """

    def __init__(self, model: Any) -> None:
        """Reads them, before a checkpoint is restored."""
        self._model = model
        self._are_callbacks = all(optimizer in _known for optimizer in optimizers_of(model))
        self.values = learning_rates(model)

    def go_on(self, saved: Rates | None, callbacks: Sequence[Any], *, tells: bool) -> None:
        """To be called when a checkpoint was restored.

        Args:
          saved: what the run began with that saved the checkpoint; `None` if it did not say so.
          callbacks: those that `fit` calls.
          tells: whether to warn if the program's were changed.
        """
        if self._are_callbacks:
            self.values = self.values if saved is None else saved
        elif tells:
            tell_of_change(saved, self.values, learning_rates(self._model), callbacks)

    def begun(self) -> None:
        """To be called before the first step."""
        _known.update(optimizers_of(self._model))


def learning_rates(model: Any) -> Rates:
    """The rates of the optimizers of `model`; `None` for those that follow a schedule, which no checkpoint changes."""
    return [OptimizerState(optimizer).learning_rate for optimizer in optimizers_of(model)]


def tell_of_change(saved: Rates | None, present: Rates, restored: Rates, callbacks: Sequence[Any]) -> None:
    """Warns if a rate was changed in the program, and the checkpoint's is used in its place.

    Args:
      saved: what the run began with that saved the checkpoint; `None` if it did not say so.
      present: what this run began with.
      restored: what it goes on with.
      callbacks: those that `fit` calls. A `LearningRateScheduler` sets the rate whatever was restored.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     tell_of_change([0.1], [0.1], [0.05], [])  # a callback has lowered it
    ...     tell_of_change([0.1], [0.01], [0.1], [])
    >>> [str(warning.message)[:30] for warning in told]
    ['The learning rate of this prog']
    """
    if saved is None or any(isinstance(other, keras.callbacks.LearningRateScheduler) for other in callbacks):
        return
    for before, now, used in zip(saved, present, restored, strict=False):
        if now is not None and now not in (before, used):
            warn(
                f"The learning rate of this program is not used: the checkpoint's is. Received: {now:g}, where the run "
                f"that saved it began with {before}. Expected: the same, as training goes on with {used:g}, bit by bit "
                "as if nothing had happened. To change it on purpose, give fit a LearningRateScheduler, or assign "
                "model.optimizer.learning_rate in on_epoch_begin of a callback; it counts from the next epoch that "
                "begins."
            )
