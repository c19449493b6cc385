"""What callbacks remember: saved as JSON and tensors, and put back into the callbacks of a program that starts again.

Kept are, for Keras' own callbacks and their subclasses:

| callback | what |
|---|---|
| `EarlyStopping`, `ReduceLROnPlateau` | the best value, its epoch and weights, the waiting, the cool-down |
| `ModelCheckpoint` | the best value, the batches since the last save |
| `History` | all epochs, so that `fit` returns what it would have returned |
| `CSVLogger` | the text of its file: lines of epochs that come again are taken out, there is one header |
| `TensorBoard` | its counts of batches; what was written of steps that come again stays in the event files, twice |
| `SwapEMAWeights` | which weights are in the model |
| any callback with `get_state` and `set_state` | what these return and take, see below |

`LearningRateScheduler`, `TerminateOnNaN`, `LambdaCallback`, `RemoteMonitor` and the progress bar remember nothing.
`BackupAndRestore` is refused. Any other callback starts anew; `without_state` names those but for the ones that say, by
an attribute `remembers_nothing = True`, that it does not matter.

**A callback of one's own** takes part by two methods: `get_state()` returns what is to be saved (None, bool, int,
float, str, NumPy's numbers and arrays, and lists, tuples and dictionaries of these), and `set_state(state)` takes it.
Arrays must be equal on all workers, as they are saved once. In a subclass of a known callback the methods add to what
is kept for that.

**Matching.** The n-th callback of a class gets what the n-th of that class has saved, by the class's name. Callbacks
that remember nothing may come and go.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.keras_internals.callbacks import attributes_of, find_direction, knows_direction
from tfdist.recovery.csv_log import restore_log, state_of_log
from tfdist.recovery.json_values import from_json, to_json

Json = dict[str, Any]

_REMEMBER_NOTHING = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.TerminateOnNaN,
    keras.callbacks.LambdaCallback,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)


class CallbackStates(NamedTuple):
    """What callbacks remember.

    Attributes:
      notes: each rank's own, as JSON.
      tensors: equal on all ranks; the notes refer to them by name.
    """

    notes: Json
    tensors: dict[str, np.ndarray]


def refuse_others(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises an error for callbacks that restore a training themselves.

    Raises:
      ValueError: there is a `BackupAndRestore`.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "Two callbacks would restore the training. Received: keras.callbacks.BackupAndRestore beside tfdist's "
                "recovery. Expected: one of them. Take BackupAndRestore out of the list; what it does is done."
            )


def without_state(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """The names of the classes of callbacks that start anew, as nothing tells what they remember."""
    return sorted(
        {
            _name(callback)
            for callback in callbacks
            if not _remembers(callback)
            and not isinstance(callback, _REMEMBER_NOTHING)
            and not getattr(callback, "remembers_nothing", False)
        }
    )


def state_of(callbacks: Sequence[keras.callbacks.Callback]) -> CallbackStates:
    """What `callbacks` remember now; to be called when all others have been called, by the last of the list.

    Raises:
      ValueError: `get_state` of a callback returned what cannot be saved; the message names it.

    >>> import keras
    >>> from tfdist.recovery.callback_state import state_of
    >>> stopping = keras.callbacks.EarlyStopping(patience=3)
    >>> stopping.on_train_begin()
    >>> stopping.wait = 2
    >>> state_of([stopping]).notes["EarlyStopping/0"]["dict"]["wait"]
    2
    """
    notes: Json = {}
    tensors: dict[str, np.ndarray] = {}
    for key, callback in _by_key(callbacks).items():
        state: Json = {name: getattr(callback, name) for name in attributes_of(callback)}
        if knows_direction(callback):
            state["direction"] = "known"
        if isinstance(callback, keras.callbacks.CSVLogger):
            state["log"] = state_of_log(callback)
        if (get_state := _method(callback, "get_state")) is not None:
            state["state"] = get_state()
        notes[key] = to_json(state, tensors, f"callbacks/{key}")
    return CallbackStates(notes, tensors)


def check(callbacks: Sequence[keras.callbacks.Callback], notes: Json, *, all_present: bool = True) -> None:
    """Compares the callbacks with those of a checkpoint, without touching one.

    Args:
      callbacks: those that `fit` calls, History included.
      notes: `CallbackStates.notes` of this rank, or of another one.
      all_present: whether all that the notes tell of must be there; not on a rank that takes over the notes of the
        chief, which may have callbacks of its own.

    Raises:
      ValueError: callbacks that remember something were added or taken out; the message names the first.
    """
    present = _by_key(callbacks)
    for key in [*present, *notes]:
        if (key in present) == (key in notes) or (key in notes and not all_present):
            continue
        name, _, number = key.rpartition("/")
        sides = [sum(other.rpartition("/")[0] == name for other in side) for side in (notes, present)]
        raise ValueError(
            f"The list of callbacks has changed. Received: {sides[0]} of class {name} in the checkpoint. Expected: "
            f"{sides[1]}, as in this program. Give the callbacks that the training began with, or another directory."
        )


def restore(callbacks: Sequence[keras.callbacks.Callback], notes: Json, tensors: Mapping[str, np.ndarray]) -> None:
    """Puts back what `callbacks` remembered; to be called after their `on_train_begin`, where most forget everything.

    The metrics of the model must be built (`TrainingVariables.build`).

    Args:
      callbacks: those that `fit` calls, History included.
      notes: what `check` has compared.
      tensors: `CallbackStates.tensors`, or any mapping that contains them.
    """
    for key, callback in _by_key(callbacks).items():
        state = from_json(notes[key], tensors)
        direction, log, own = (state.pop(name, None) for name in ("direction", "log", "state"))
        for name, value in state.items():
            setattr(callback, name, value)
        if direction is not None:
            find_direction(callback)
        if log is not None:
            restore_log(callback, log)
        if (set_state := _method(callback, "set_state")) is not None:
            set_state(own)


def _by_key(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    found: dict[str, keras.callbacks.Callback] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        if _remembers(callback):
            name = _name(callback)
            found[f"{name}/{counts.get(name, 0)}"] = callback
            counts[name] = counts.get(name, 0) + 1
    return found


def _remembers(callback: keras.callbacks.Callback) -> bool:
    known = bool(attributes_of(callback)) or isinstance(callback, keras.callbacks.CSVLogger)
    return known or _method(callback, "get_state") is not None


def _method(callback: keras.callbacks.Callback, name: str) -> Callable[..., Any] | None:
    both = all(callable(getattr(callback, method, None)) for method in ("get_state", "set_state"))
    return getattr(callback, name) if both else None


def _name(callback: keras.callbacks.Callback) -> str:
    return type(callback).__qualname__
