"""Callbacks that write the logs, and those that add to them."""

import warnings

import keras

from tfdist.callbacks.neighbours import callbacks_beside


def warn_of_earlier_writers(callback: keras.callbacks.Callback) -> None:
    """Warns of callbacks that are called before `callback`, and so write logs to which it has not yet added."""
    beside = callbacks_beside(callback)
    before = beside[: beside.index(callback)] if beside else []
    earlier = [type(other).__name__ for other in before if isinstance(other, _log_writers())]
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
