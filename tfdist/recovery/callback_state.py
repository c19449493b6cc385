"""Saves the state of callbacks as JSON and tensors, and restores it in a program that starts again.

Saved for Keras' callbacks and their subclasses:

| callback | state |
|---|---|
| `EarlyStopping`, `ReduceLROnPlateau` | the best value, its epoch and weights, the wait and cool-down counts |
| `ModelCheckpoint` | the best value, the batches since the last save |
| `History` | all epochs, so that `fit` returns the complete history |
| `CSVLogger` | the text of its file: one header, no lines of epochs that are repeated |
| `TensorBoard` | its counts of batches; event files contain repeated steps twice |
| `SwapEMAWeights` | which weights are in the model |
| any callback with `get_state` and `set_state` | what these return and take, see below |

`LearningRateScheduler`, `TerminateOnNaN`, `LambdaCallback`, `RemoteMonitor` and the progress bar have no state.
`BackupAndRestore` is rejected. Any other callback loses its state; `callbacks_without_state` names it unless it has an
attribute `is_stateless = True`.

**Custom callbacks** take part by two methods: `get_state()` returns what to save (None, bool, int, float, str, NumPy's
numbers and arrays, and lists, tuples and dictionaries of these), and `set_state(state)` takes it. Arrays must be equal
on all workers, because they are saved once. In a subclass of a Keras callback the methods add to the state above.

**Matching.** The n-th callback of a class gets the state of the n-th saved one, by the name of the class. Callbacks
without state may be added and removed.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.keras_callbacks import find_monitor_direction, has_monitor_direction, state_attributes
from tfdist.utils.json_state import from_json, to_json
from tfdist.utils.temporary_values import setting_attributes

Json = dict[str, Any]

_STATELESS = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.TerminateOnNaN,
    keras.callbacks.LambdaCallback,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
_ENCODING = {"encoding": "utf-8", "errors": "surrogateescape"}


PYTHON_TENSORS = ("callbacks/", "objects/")  # how the names of arrays begin that belong to no variable


class CallbackStates(NamedTuple):
    """The states of the callbacks of a `fit`, or of the objects of a custom loop."""

    values: Json  # the states of this rank, as JSON, by class name and number
    tensors: Mapping[str, np.ndarray]  # arrays, equal on all ranks, to which `values` refers by name
    own_tensors: Mapping[str, np.ndarray] = MappingProxyType({})  # those of this rank


def reject_backup_and_restore(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises an error for callbacks that restore a training themselves.

    Raises:
        ValueError: If `callbacks` contains a `BackupAndRestore`.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "BackupAndRestore cannot be combined with FailureRecovery. Received: both in the list of callbacks. "
                "Expected: one of them. Remove BackupAndRestore; FailureRecovery does all that it does."
            )


def callbacks_without_state(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """Returns the class names of callbacks that lose their state because it is not known."""
    return sorted(
        {
            _class_name(callback)
            for callback in callbacks
            if not _has_state(callback)
            and not isinstance(callback, _STATELESS)
            and not getattr(callback, "is_stateless", False)
        }
    )


def save_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> CallbackStates:
    """Returns the present states. Only the last callback of a list sees the states after a step or an epoch.

    Raises:
        ValueError: If `get_state` of a callback returns what cannot be saved; the message names the callback.

    >>> import keras
    >>> from tfdist.recovery.callback_state import save_callbacks
    >>> stopping = keras.callbacks.EarlyStopping(patience=3)
    >>> stopping.on_train_begin()
    >>> stopping.wait = 2
    >>> save_callbacks([stopping]).values["EarlyStopping/0"]["dict"]["wait"]
    2
    """
    values: Json = {}
    tensors: dict[str, np.ndarray] = {}
    for key, callback in _by_key(callbacks).items():
        state: Json = {name: getattr(callback, name) for name in state_attributes(callback)}
        if has_monitor_direction(callback):
            state["direction"] = "known"
        if isinstance(callback, keras.callbacks.CSVLogger):
            state["log"] = _log_state(callback)
        if (get_state := _state_method(callback, "get_state")) is not None:
            state["state"] = get_state()
        values[key] = to_json(state, tensors, f"callbacks/{key}")
    return CallbackStates(values, tensors)


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback], values: Json, *, all_present: bool = True) -> None:
    """Compares the callbacks with those of a checkpoint, without changing one.

    Every saved callback must exist if `all_present`: a rank that restores the states of the chief may lack some.

    Raises:
        ValueError: If callbacks with state were added or removed; the message names the first.
    """
    present = _by_key(callbacks)
    for key in [*present, *values]:
        if (key in present) == (key in values) or (key in values and not all_present):
            continue
        name, _, _ = key.rpartition("/")
        counts = [sum(other_key.rpartition("/")[0] == name for other_key in side) for side in (values, present)]
        raise ValueError(
            f"The list of callbacks has changed. Received: {counts[0]} of class {name} in the checkpoint. Expected: "
            f"{counts[1]}, as in this program. Pass the callbacks with which the training started, or use another "
            "directory."
        )


def restore_callbacks(
    callbacks: Sequence[keras.callbacks.Callback], values: Json, tensors: Mapping[str, np.ndarray]
) -> None:
    """Restores the states. Call this after `on_train_begin` of the callbacks, where most of them reset their state.

    The metrics of the model must be built (`VariableSnapshots.build`).
    """
    for key, callback in _by_key(callbacks).items():
        state = from_json(values[key], tensors)
        direction, log, custom = (state.pop(name, None) for name in ("direction", "log", "state"))
        for name, value in state.items():
            setattr(callback, name, value)
        if direction is not None:
            find_monitor_direction(callback)
        if log is not None:
            _restore_log(callback, log)
        if (set_state := _state_method(callback, "set_state")) is not None:
            set_state(custom)


def _by_key(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    callbacks_by_key: dict[str, keras.callbacks.Callback] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        if _has_state(callback):
            name = _class_name(callback)
            callbacks_by_key[f"{name}/{counts.get(name, 0)}"] = callback
            counts[name] = counts.get(name, 0) + 1
    return callbacks_by_key


def _has_state(callback: keras.callbacks.Callback) -> bool:
    known = bool(state_attributes(callback)) or isinstance(callback, keras.callbacks.CSVLogger)
    return known or _state_method(callback, "get_state") is not None


def _state_method(callback: keras.callbacks.Callback, name: str) -> Callable[..., Any] | None:
    has_both = all(callable(getattr(callback, method, None)) for method in ("get_state", "set_state"))
    return getattr(callback, name) if has_both else None


def _class_name(callback: keras.callbacks.Callback) -> str:
    return type(callback).__qualname__


def _log_state(logger: keras.callbacks.CSVLogger) -> Json:
    """Returns the text of the log and its columns.

    The text is needed because a logger that does not append empties its file in `on_train_begin`, before anything can
    be restored.
    """
    text = ""
    if tf.io.gfile.exists(logger.filename):
        with tf.io.gfile.GFile(logger.filename, "rb") as file:
            text = file.read().decode(**_ENCODING)
    return {"text": text, "keys": logger.keys}


def _restore_log(logger: keras.callbacks.CSVLogger, state: Json) -> None:
    """Writes the saved log, without the lines of epochs that are repeated, and opens it for appending."""
    if logger.csv_file is not None and not logger.csv_file.closed:
        logger.csv_file.close()
    with tf.io.gfile.GFile(logger.filename, "wb") as file:
        file.write(state["text"].encode(**_ENCODING))
    with setting_attributes(logger, append=True):
        keras.callbacks.CSVLogger.on_train_begin(logger)  # checks whether the file has a header
    logger.keys = state["keys"]
