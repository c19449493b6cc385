"""The running `fit` of a model: its epoch iterator, where it starts, the logs of an epoch without steps."""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import keras

from tfdist.private_symbols import private

private("keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs", "takes the logs of the epoch's last step")


class RunningFit:
    """One call of `fit`.

    Attributes:
      model: the model that is fitted.
    """

    def __init__(self, model: Any, iterator: Any) -> None:
        self.model = model
        self._iterator = weakref.ref(iterator)
        self._code = _code_of_caller(model)
        self._undo: list[Any] = []
        self._at_end: list[Callable[[], object]] = []

    @property
    def iterator(self) -> Any:
        """Its epoch iterator over the training data; `None` when that is gone, as after an exception."""
        return self._iterator()

    def is_beneath(self, frame: FrameType | None) -> bool:
        """Whether `frame`, of the thread that `fit` was called in, was called by it; not after an exception."""
        # No frame is kept, which would keep the data.
        return self._code is None or any(_is_call(above, self._code, self.model) for above in _callers(frame))

    def start_at_epoch(self, epoch: int | None) -> None:
        """Makes this `fit` begin with `epoch`, from 0; with 0 or `None` where it was told to."""
        self._undo.append(self.model._initial_epoch)
        self.model._initial_epoch = epoch

    def supply_logs(self, logs: dict[str, Any] | None) -> None:
        """Gives this `fit` the logs of its first epoch, should it make no step in it.

        That happens where training goes on behind the last step of an epoch. Keras takes its logs from that step, and
        the values from the metrics if these have the same names.

        Args:
          logs: what the last step has logged; `None` for the metrics.
        """
        model = self.model
        stock = model._get_metrics_result_or_logs

        def logs_of_epoch(step_logs: Any) -> Any:
            if step_logs:
                return stock(step_logs)
            model.__dict__.pop("_get_metrics_result_or_logs", None)
            return stock(dict(model.get_metrics_result()) if logs is None else logs)

        # Past Keras' tracking of attributes, which would take the function for a part of the model.
        object.__setattr__(model, "_get_metrics_result_or_logs", logs_of_epoch)

    def at_end(self, function: Callable[[], object]) -> None:
        """Calls `function` when this `fit` is over, by an exception, too."""
        self._at_end.append(function)

    def end(self) -> None:
        """Leaves the model to the next `fit` as it was."""
        for function in self._at_end:
            function()
        if self._undo:
            self.model._initial_epoch = self._undo[0]
        self.model.__dict__.pop("_get_metrics_result_or_logs", None)


class _Running(threading.local):
    def __init__(self) -> None:
        self.newest: Callable[[], Any] = lambda: None  # the newest epoch iterator of training data
        self.fits: list[RunningFit] = []  # the innermost last: a callback may fit another model


_running = _Running()


def install_running_fit() -> None:
    """Makes Keras say which `fit` runs; to be called again at will.

    It takes effect for a `fit` whose arguments are being made, too (`model.fit(..., callbacks=[FailureRecovery(...)])`
    has looked `fit` up before): what is replaced is called later.
    """
    begin, end = keras.callbacks.CallbackList.on_train_begin, keras.callbacks.CallbackList.on_train_end
    if getattr(begin, "is_known", False):
        return

    @functools.wraps(begin)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        model = _model_of(self)
        for running in [running for running in _running.fits if running.model is model or running.iterator is None]:
            _end(running)  # one that an exception has ended
        iterator = _running.newest()
        if iterator is not None and model is not None:
            _running.fits.append(RunningFit(model, iterator))
            _running.newest = lambda: None
        try:
            begin(self, logs)
        except BaseException:
            end_of(model)
            raise

    @functools.wraps(end)
    def on_train_end(self: Any, logs: Any = None) -> None:
        try:
            end(self, logs)
        finally:
            end_of(_model_of(self))

    def end_of(model: Any) -> None:
        if (running := running_fit(model)) is not None:
            _end(running)

    on_train_begin.is_known = True  # type: ignore[attr-defined]
    keras.callbacks.CallbackList.on_train_begin = on_train_begin
    keras.callbacks.CallbackList.on_train_end = on_train_end


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_call(frame: FrameType, code: CodeType, of: Any) -> bool:
    """Whether `frame` runs `code` as a method of `of`."""
    return frame.f_code is code and code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is of


def _code_of_caller(model: Any) -> CodeType | None:
    """The code of the method of `model`, `fit`, that has called this; `None` in a loop that is no method of it."""
    callers = (frame for frame in _callers(sys._getframe(1)) if _is_call(frame, frame.f_code, model))
    return next((frame.f_code for frame in callers), None)


def _model_of(callbacks: keras.callbacks.CallbackList) -> Any:
    """The model that `callbacks` were given; `None` where a loop of the user's calls them without one."""
    try:
        return callbacks.model
    except AttributeError:
        return None


def _end(running: RunningFit) -> None:
    _running.fits.remove(running)
    running.end()


def claim_fit(iterator: Any, arguments: Iterable[str]) -> bool:
    """Whether `iterator` is the training data's; to be called once when an epoch iterator is made.

    Args:
      iterator: the epoch iterator.
      arguments: the names of those it was made with. Weights of classes are for training alone.
    """
    if "class_weight" not in arguments:
        return False
    _running.newest = weakref.ref(iterator)
    return True


def fit_validated_by(iterator: Any) -> RunningFit | None:
    """The `fit` in this thread whose validation data `iterator` is drawn from."""
    for running in reversed(_running.fits):
        if getattr(running.model, "_eval_epoch_iterator", None) is iterator:
            return running
    return None


def running_fit(model: Any) -> RunningFit | None:
    """The `fit` of `model` that runs in this thread, if any, from `on_train_begin` to `on_train_end`."""
    return next((running for running in reversed(_running.fits) if running.model is model), None)
