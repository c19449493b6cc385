"""Warnings of FailureRecovery: training already complete, diverged, or with a learning rate that is ignored."""

import logging
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.keras_internals.model_state import OptimizerState
from tfdist.recovery.callback_state import callbacks_without_state
from tfdist.recovery.training_state import TrainingProgress

_log = logging.getLogger("tfdist")


def warn_always(message: str) -> None:
    """Warns at every call, where `warnings.warn` shows repeated warnings only once.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("default")
    ...     for _ in range(2):
    ...         warn_always("Nothing is trained.")
    >>> len(seen)
    2
    """
    caller = sys._getframe(1)
    # Without a registry Python does not record that the warning was shown.
    warnings.warn_explicit(message, UserWarning, caller.f_code.co_filename, caller.f_lineno)


def warn_lost_callback_state(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Warns of callbacks whose state is not saved because it is not known."""
    if unknown := callbacks_without_state(callbacks):
        warnings.warn(
            f"These callbacks lose their state at a restart: {', '.join(unknown)}. If they keep state between steps, "
            "add the methods `get_state` and `set_state` (tfdist.recovery.callback_state).",
            stacklevel=3,
        )


def warn_signals_not_handled(recovery: str = "FailureRecovery", training: str = "`fit`") -> None:
    """Warns that `fit`, or a loop, runs in a thread that receives no signals."""
    warn_always(
        f"{recovery} does not handle signals: {training} does not run in the main thread, the only one in which Python "
        f"handles them. Expected: {training} in the main thread; or, called there after the strategy was created, "
        f"`signal.signal(signal.SIGTERM, lambda *_: recovery.request_exit())`, where `recovery` is this {recovery}; or "
        f"`{recovery}(..., handle_signals=False)` if nothing sends signals."
    )


def warn_saved_at_end_only() -> None:
    """Warns that a custom loop without epochs has no other interval between two saves."""
    warn_always(
        "LoopRecovery saves this loop at its end only. Received: a pass outside of `recovery.epochs`, and no interval "
        "between two saves. Expected: `every_steps`, `every_seconds`, or epochs that `recovery.epochs` numbers."
    )


def warn_shared_shuffle() -> None:
    """Warns that two custom loops draw from one shuffle."""
    warn_always(
        "Two loops draw from one shuffle, whose order continues from the first to the second. After a restart the "
        "first is complete and draws nothing, so the second would draw another order. Received: data with a `shuffle` "
        "that an earlier LoopRecovery has drawn from. Expected: data that each loop makes for itself, or `shuffle(…, "
        "reshuffle_each_iteration=False)`."
    )


def warn_other_seed(before: Mapping[str, Any] | None, now: Mapping[str, Any], training: str = "`fit`") -> None:
    """Warns that the program has drawn other numbers before `fit`, or a loop, than before the checkpoint, as a split.

    Both are what `drawn_before_fit` returned; None: an older version saved the checkpoint.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("always")
    ...     warn_other_seed({"seed": 1, "numpy": 11}, {"seed": 2, "numpy": None})
    ...     warn_other_seed({"seed": 1, "numpy": 11}, {"seed": 2, "numpy": 12})
    >>> len(seen)
    1
    """
    if before is None or before["seed"] == now["seed"] or now["numpy"] in (None, before["numpy"]):
        return
    if before["seed"] is None:
        return
    warn_always(
        f"The program has drawn other random numbers before {training} than the run that saved the checkpoint: a split "
        "of the data that it draws without a seed is another one, so that the model is validated with samples that it "
        f"was trained on. Received: seed {now['seed']} of this run. Expected: seed {before['seed']}. Start it with "
        f"`tfdist run --seed {before['seed']}` (or TFDIST_SEED={before['seed']}), or seed the program."
    )


def warn_training_complete(progress: TrainingProgress, epochs: int, directory: Any) -> None:
    """Warns that `fit` trains nothing."""
    how = ", ended by a callback that set stop_training" if progress.stopped else ""
    warn_always(
        f"Training is already complete in {str(directory)!r}: `fit` trains nothing. Received: epochs={epochs}, and a "
        f"checkpoint of a completed training of {progress.epoch} epochs{how}; the model now has its weights. Expected: "
        "more epochs, to continue it, or another directory, for a new training: use one directory per fold, phase or "
        "setting."
    )


def is_terminated_by_nan(model: Any, callbacks: Iterable[Any], logs: Mapping[str, Any] | None) -> bool:
    """Returns whether `TerminateOnNaN` ends the training after the step with `logs`.

    Call this after all `callbacks` have seen the step: a subclass of `TerminateOnNaN` may accept some losses. All
    workers get the same result, because logs are those of all replicas.

    >>> import keras, types
    >>> stopped, callbacks = types.SimpleNamespace(stop_training=True), [keras.callbacks.TerminateOnNaN()]
    >>> logs = {"loss": float("inf")}
    >>> is_terminated_by_nan(stopped, callbacks, logs), is_terminated_by_nan(stopped, [], logs)
    (True, False)
    >>> is_terminated_by_nan(types.SimpleNamespace(stop_training=False), callbacks, logs)
    False
    """
    if not model.stop_training:
        return False
    loss = (logs or {}).get("loss")
    terminates = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks)
    return terminates and loss is not None and not bool(np.all(np.isfinite(loss)))


def warn_terminated_by_nan(step: int, directory: Any) -> None:
    """Warns that the last step was not saved, and explains how to continue. `directory` may be an address."""
    newest = "objects commits/*" if "://" in str(directory) else "directories ckpt-*"
    warn_always(
        f"TerminateOnNaN has ended the training, which is not marked as complete. Received: a loss that is not finite, "
        f"at step {step}. Expected: a finite loss. This step was not saved: when started again, the program resumes "
        f"from the newest earlier checkpoint in {str(directory)!r}. Fix the cause first. If the weights were damaged "
        f"earlier, remove the newest of the {newest} there, until training resumes early enough."
    )


def warn_not_saved(step: int, error: Exception) -> None:
    """Logs that an object store, or memory, did not take a checkpoint.

    Called in the thread that saves, where warnings get lost.
    """
    _log.warning(
        "FailureRecovery: training continues without a checkpoint of step %d, and the next that is due is saved. "
        "Received: %s",
        step,
        error,
    )


Rates = list[float | None]
CHANGE_IN_FIT = (
    "pass a LearningRateScheduler to fit, or assign model.optimizer.learning_rate in on_epoch_begin of a callback, "
    "which takes effect when the next epoch begins"
)
_trained_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers with which this process has trained


class InitialLearningRates:
    """The learning rates with which a run started: those of the program, before callbacks changed them.

    In a process that trains again with the same optimizers, such as a notebook, callbacks may have set the rates.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        """Reads the rates. Call this before a checkpoint is restored."""
        self._optimizers = list(optimizers)
        self._may_be_of_callbacks = all(optimizer in _trained_optimizers for optimizer in self._optimizers)
        self.values = self._present()

    def compare_with_restored(
        self, saved: Rates | None, callbacks: Sequence[Any], *, warn: bool, change: str = CHANGE_IN_FIT
    ) -> None:
        """Warns if the program's rates have changed. Call this after a checkpoint was restored."""
        if self._may_be_of_callbacks:
            self.values = self.values if saved is None else saved
        elif warn:
            warn_learning_rate_ignored(saved, self.values, self._present(), callbacks, change)

    def mark_trained(self) -> None:
        """Notes that this process trains with the optimizers. Call this before the first step."""
        _trained_optimizers.update(self._optimizers)

    def _present(self) -> Rates:
        """Returns the rates; None for a schedule, which belongs to the program, not to checkpoints."""
        return [OptimizerState(optimizer).learning_rate for optimizer in self._optimizers]


def warn_learning_rate_ignored(
    saved: Rates | None, present: Rates, restored: Rates, callbacks: Sequence[Any], change: str = CHANGE_IN_FIT
) -> None:
    """Warns if a rate was changed in the program and the checkpoint's is used instead.

    A `LearningRateScheduler` sets the rate whatever was restored.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as shown:
    ...     warnings.simplefilter("always")
    ...     warn_learning_rate_ignored([0.1], [0.1], [0.05], [])  # a callback has lowered it
    ...     warn_learning_rate_ignored([0.1], [0.01], [0.1], [])
    >>> [str(warning.message)[:30] for warning in shown]
    ['The learning rate of this prog']
    """
    if saved is None or any(isinstance(callback, keras.callbacks.LearningRateScheduler) for callback in callbacks):
        return
    for before, now, used in zip(saved, present, restored, strict=False):
        if now is not None and now not in (before, used):
            warn_always(
                f"The learning rate of this program is ignored: training resumes with that of the checkpoint. "
                f"Received: {now:g}, where the run that saved the checkpoint started with {before}. Expected: the same "
                f"value; training resumes with {used:g}, as if it had not been interrupted. To change the rate, "
                f"{change}."
            )
