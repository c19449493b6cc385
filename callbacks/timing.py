"""Taking the times of the exchange, once for all callbacks of a training that want them."""

from typing import Any

import keras

from tfdist.callbacks.neighbours import callbacks_beside


def begin_timing(callback: keras.callbacks.Callback) -> None:
    """Has the training step take times, from zero, if `callback` is the first of its list with `takes_times`.

    To be called in `on_train_begin`. The step is traced anew.
    """
    if _is_counted(callback) and _those_that_want_times(callback)[0] is callback:
        _time(callback, True)


def end_timing(callback: keras.callbacks.Callback) -> None:
    """Ends that, if `callback` is the last such one of its list; to be called in `on_train_end`."""
    if _is_counted(callback) and _those_that_want_times(callback)[-1] is callback:
        _time(callback, False)


def _those_that_want_times(callback: keras.callbacks.Callback) -> list[Any]:
    beside = callbacks_beside(callback) or [callback]
    return [other for other in beside if getattr(other, "takes_times", False)] or [None]


def _is_counted(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback.model.distribute_strategy, "time_communication")


def _time(callback: keras.callbacks.Callback, enabled: bool) -> None:
    callback.model.distribute_strategy.time_communication(enabled)
    callback.model.make_train_function(force=True)
