"""The running `fit` of a model: its epoch iterator, its first epoch, the logs of an epoch without steps."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from tfdist.keras_internals.call_frames import callers, is_call
from tfdist.keras_internals.keras_callbacks import wrap_callback_list


class RunningFit:
    """One call of `fit` of `model`."""

    def __init__(self, model: Any, iterator: Any) -> None:
        self.model = model
        self._iterator = weakref.ref(iterator)
        self._code = _code_of_caller(model)
        self._initial_epochs: list[Any] = []  # before each change
        self._at_end: list[Callable[[], object]] = []

    @property
    def iterator(self) -> Any:
        """The epoch iterator over the training data; `None` once it is deleted, as after an exception."""
        return self._iterator()

    def is_caller_of(self, frame: FrameType | None) -> bool:
        """Whether this call of `fit`, still running, has called `frame`, a frame of the same thread."""
        # No frame is stored, as it would keep the data alive.
        return self._code is None or any(is_call(above, self._code, self.model) for above in callers(frame))

    def start_at_epoch(self, epoch: int | None) -> None:
        """Makes this `fit` begin with `epoch`, from 0; with 0 or `None`, with its `initial_epoch`."""
        self._initial_epochs.append(self.model._initial_epoch)
        self.model._initial_epoch = epoch

    def set_epoch_logs(self, logs: dict[str, Any] | None) -> None:
        """Sets the logs of the first epoch of this `fit`, in case it makes no step in it.

        That happens when training resumes after the last step of an epoch. Keras takes the epoch's logs from that step,
        and the values from the metrics if these have the same names. `logs` are those of the last step, or `None` for
        the results of the metrics.
        """
        model = self.model
        stock = model._get_metrics_result_or_logs

        def logs_of_epoch(step_logs: Any) -> Any:
            if step_logs:
                return stock(step_logs)
            model.__dict__.pop("_get_metrics_result_or_logs", None)
            return stock(dict(model.get_metrics_result()) if logs is None else logs)

        # Bypasses Keras' tracking of attributes, which would take the function for a part of the model.
        object.__setattr__(model, "_get_metrics_result_or_logs", logs_of_epoch)

    def on_end(self, function: Callable[[], object]) -> None:
        """Calls `function` when this `fit` ends, also by an exception."""
        self._at_end.append(function)

    def end(self) -> None:
        """Restores the model for the next `fit`."""
        at_end, self._at_end = self._at_end, []  # functions that may refer to this `fit`, and so keep its model alive
        for function in at_end:
            function()
        if self._initial_epochs:
            self.model._initial_epoch = self._initial_epochs[0]
        self.model.__dict__.pop("_get_metrics_result_or_logs", None)


class _Running(threading.local):
    def __init__(self) -> None:
        self.newest_iterator: Callable[[], Any] = lambda: None  # the newest epoch iterator over training data
        self.fits: list[RunningFit] = []  # the innermost last: a callback may fit another model


_running = _Running()


def track_running_fits() -> None:
    """Makes `running_fit` know every later `fit`. More calls have no effect.

    This includes a `fit` whose arguments are being evaluated (`model.fit(..., callbacks=[FailureRecovery(...)])`).
    """
    wrap_callback_list("on_train_begin", _on_train_begin)
    wrap_callback_list("on_train_end", _on_train_end)


def is_of_training(arguments: Iterable[str]) -> bool:
    """Whether an epoch iterator is over training data, by the names of the arguments that it is created with."""
    return "class_weight" in arguments  # only training has them


def register_training_iterator(iterator: Any) -> None:
    """Registers the epoch iterator of the next `fit` in this thread."""
    _running.newest_iterator = weakref.ref(iterator)


def fit_validating_with(iterator: Any) -> RunningFit | None:
    """Returns the `fit` in this thread whose validation data `iterator` iterates over."""
    fits = reversed(_running.fits)
    return next((running for running in fits if getattr(running.model, "_eval_epoch_iterator", None) is iterator), None)


def running_fit(model: Any) -> RunningFit | None:
    """Returns the `fit` of `model` that runs in this thread, from `on_train_begin` to `on_train_end`, if any."""
    return next((running for running in reversed(_running.fits) if running.model is model), None)


def _on_train_begin(call: Callable[..., None], callback_list: Any, logs: Any = None) -> None:
    model = getattr(callback_list, "model", None)  # a custom loop may create the list without one
    for running in [running for running in _running.fits if running.model is model or running.iterator is None]:
        _end(running)  # an exception has ended it
    iterator = _running.newest_iterator()
    if iterator is not None and model is not None:
        _running.fits.append(RunningFit(model, iterator))
        _running.newest_iterator = lambda: None
    try:
        call(logs)
    except BaseException:
        _end_fit_of(model)
        raise


def _on_train_end(call: Callable[..., None], callback_list: Any, logs: Any = None) -> None:
    try:
        call(logs)
    finally:
        _end_fit_of(getattr(callback_list, "model", None))


def _end_fit_of(model: Any) -> None:
    if (running := running_fit(model)) is not None:
        _end(running)


def _end(running: RunningFit) -> None:
    _running.fits.remove(running)
    running.end()


def _code_of_caller(model: Any) -> CodeType | None:
    """Returns the code of the method of `model`, `fit`, that has called this; `None` in a custom loop."""
    methods = (frame.f_code for frame in callers(sys._getframe(1)) if is_call(frame, frame.f_code, model))
    return next(methods, None)
