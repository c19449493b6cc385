"""Callbacks that write the logs, and those that add to them."""

import inspect
import warnings

import keras


def warn_of_earlier_writers(callback: keras.callbacks.Callback) -> None:
    """Warns of callbacks that are called before `callback`, and so write logs to which it has not yet added."""
    earlier = [type(other).__name__ for other in _called_before(callback) if isinstance(other, _log_writers())]
    if earlier:
        name = type(callback).__name__
        warnings.warn(
            f"Callbacks that stand before {name} do not see what it adds to the logs. Received: {', '.join(earlier)} "
            f"before it. Expected: {name} before them. Move it to the front of the list of callbacks.",
            stacklevel=3,
        )


def _log_writers() -> tuple[type, ...]:
    known = keras.callbacks
    return known.CSVLogger, known.TensorBoard, known.RemoteMonitor, known.History, known.ProgbarLogger


def _called_before(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """The callbacks that stand before `callback` in the list that is calling it; Keras does not show it the list."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList) and callback in caller.callbacks:
            return caller.callbacks[: caller.callbacks.index(callback)]
        frame = frame.f_back
    return []
