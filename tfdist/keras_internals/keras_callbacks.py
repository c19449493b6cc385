"""Keras' callbacks: wrapping their list, callbacks that know it or run last in it, the progress bar, saved state."""

import functools
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfdist.keras_internals.call_frames import is_within_call_of_fit
from tfdist.patches import patch, replace
from tfdist.private_symbols import has_reached, private
from tfdist.strategy_hooks import hooks_of

_MONITORS = tuple(
    getattr(keras.callbacks, name)
    for name in ("EarlyStopping", "ModelCheckpoint", "OrbaxCheckpoint", "ReduceLROnPlateau")
    if hasattr(keras.callbacks, name)
)
private(
    "keras.src.callbacks.monitor_callback:MonitorCallback._set_monitor_op",
    "chooses that direction from the metric's name",
    since="3.11",
)

_LOG_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
)
# The state of each class; configuration is left to the program. `min_delta` and `monitor_op` are left out on purpose:
# see `find_monitor_direction`.
_STATE_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "wait", "stopped_epoch", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: (
        "_global_train_batch",
        "_global_test_batch",
        "_previous_epoch_iterations",
        "_should_write_train_graph",
    ),
}
_BEFORE_STEPS = ("on_epoch_begin", "on_batch_begin", "on_train_batch_begin", "set_state")
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_READ_SECONDS = 0.5  # how often a moving bar reads the counters
# Older versions of the bar turn each value into a plain number, which cannot show its unit.
_LABEL = "sent" if has_reached("keras", "3.12") else "sent_bytes_per_step"


@patch
def wrap_callback_list(method: str, wrapper: Callable[..., None]) -> None:
    """Wraps a method of all callback lists, also of those that exist. Adding the same wrapper again has no effect.

    Keras has no hook around all callbacks. The wrapper is called as `wrapper(call, callback_list, *args, **kwargs)`;
    `call(*args, **kwargs)` calls the wrapper that was added before, or Keras' method.
    """
    stock = getattr(keras.callbacks.CallbackList, method)

    @replace(keras.callbacks.CallbackList, method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapper(functools.partial(stock, self), self, *args, **kwargs)


@patch
def patch_ends_of_loops() -> None:
    """Calls strategies before callbacks learn that `fit`, `evaluate` or `predict` has ended."""
    for method in ("on_train_end", "on_test_end", "on_predict_end"):
        wrap_callback_list(method, functools.partial(_at_end, method == "on_train_end"))


def _at_end(is_training: bool, call: Callable[..., None], callback_list: Any, *args: Any, **kwargs: Any) -> None:
    strategy: Any = getattr(getattr(callback_list, "model", None), "distribute_strategy", None)
    hooks_of(strategy).at_end(strategy, is_training)
    call(*args, **kwargs)


class ListedCallback(keras.callbacks.Callback):
    """A callback that knows the list of callbacks to which it belongs.

    The list is known from the beginning of the first training on.
    """

    def __init__(self) -> None:
        super().__init__()
        # Weak: a reference cycle would keep this callback, and a checkpoint's copies, until garbage is collected.
        self._listed: tuple[weakref.ref[keras.callbacks.Callback], ...] = ()
        wrap_callback_list("on_train_begin", _order_and_show_list)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_listed": ()}  # weak references cannot be pickled

    @property
    def neighbours(self) -> tuple[keras.callbacks.Callback, ...]:
        """The callbacks of the list that exist, including this one, in the order in which Keras calls them."""
        return tuple(callback for reference in self._listed if (callback := reference()) is not None)

    def warn_of_earlier_log_writers(self) -> None:
        """Warns of callbacks that write the logs and run before this one, which adds to the logs."""
        neighbours = self.neighbours
        before = neighbours[: neighbours.index(self)] if neighbours else ()
        earlier = [type(callback).__name__ for callback in before if isinstance(callback, _LOG_WRITERS)]
        if earlier:
            name = type(self).__name__
            warnings.warn(
                f"Callbacks before {name} do not see what it adds to the logs. Received: {', '.join(earlier)} before "
                f"it. Expected: {name} before them. Move it to the front of the list of callbacks.",
                stacklevel=3,
            )


class LastCallback(ListedCallback):
    """A callback that Keras calls after all others, whatever its position in the list.

    It sees the results of the other callbacks for a batch or an epoch, and can restore their state.

    Attributes:
        restores_training: Whether it makes `fit` resume from what an earlier process has saved.
    """

    restores_training = False

    @property
    def others(self) -> tuple[keras.callbacks.Callback, ...]:
        """The callbacks of its list, except those of this kind."""
        return tuple(callback for callback in self.neighbours if not isinstance(callback, LastCallback))


def has_own_code_before_steps(callback: Any) -> bool:
    """Whether code of the program may run in a callback between `on_train_begin` and the first step of a `fit`.

    It may change what a step is traced with. Setting the state of a callback counts, too.

    >>> has_own_code_before_steps(keras.callbacks.ModelCheckpoint("model.keras"))
    False
    >>> has_own_code_before_steps(keras.callbacks.LambdaCallback(on_epoch_begin=print))
    True
    """
    methods = [getattr(callback, name, None) for name in _BEFORE_STEPS]
    modules = [getattr(method, "__module__", None) or "" for method in methods if method is not None]
    return not {module.partition(".")[0] for module in modules} <= {"keras", "tfdist"}


def _order_and_show_list(call: Callable[..., None], callback_list: Any, logs: Any = None) -> None:
    # Keras calls callbacks in the order of the list, and does not show them the list.
    callback_list.callbacks.sort(key=lambda callback: isinstance(callback, LastCallback))
    for callback in callback_list.callbacks:
        if isinstance(callback, ListedCallback):
            callback._listed = tuple(map(weakref.ref, callback_list.callbacks))
    call(logs)


def state_attributes(callback: Any) -> tuple[str, ...]:
    """Returns the names of the attributes in which a callback of Keras, or of a subclass, keeps its state."""
    return tuple(name for known, names in _STATE_ATTRIBUTES.items() if isinstance(callback, known) for name in names)


def has_monitor_direction(callback: Any) -> bool:
    """Whether a callback that monitors a quantity has determined whether it should fall or rise."""
    return isinstance(callback, _MONITORS) and getattr(callback, "monitor_op", None) is not None


def find_monitor_direction(callback: Any) -> None:
    """Makes a callback determine its direction now, not at the end of an epoch; that changes the sign of `min_delta`.

    Call this after the model's metrics are built.
    """
    if callback.monitor_op is None:
        callback._set_monitor_op()


def open_files(callback: Any) -> list[Any]:
    """Returns the files that a callback of Keras has written to and not closed; each has a method `flush`."""
    if isinstance(callback, keras.callbacks.TensorBoard):
        return list(callback._writers.values())
    files = [callback.csv_file] if isinstance(callback, keras.callbacks.CSVLogger) else []
    return [file for file in files if file is not None and not file.closed]


class BytesPerStep(float):
    """A number of bytes that formats itself in its largest unit, because Keras' bar shows only numbers.

    >>> f"{BytesPerStep(1234567) / 1:.4f}"
    '1.2 MB/step'
    """

    def __truediv__(self, other: Any) -> "BytesPerStep":
        return BytesPerStep(float(self) / other)

    def __format__(self, spec: str) -> str:
        size, unit = next(((size, unit) for size, unit in _UNITS if self >= size), (1.0, "B"))
        return f"{float(self) / size:.{0 if unit == 'B' else 1}f} {unit}/step"


class CommunicationProgressBar(keras.callbacks.ProgbarLogger):
    """Keras' bar with the bytes of gradients that a step sends; no other callback sees them."""

    def __init__(self, sent_bytes: Callable[[], int | None]) -> None:
        """Creates the bar; `sent_bytes` returns the number of bytes sent so far, `None` if they are not counted."""
        super().__init__()
        self._sent_bytes = sent_bytes
        self._before: int | None = None
        self._first = self._next = 0  # of this epoch: the first step of this `fit`, and the next step
        self._per_step: BytesPerStep | None = None
        self._read_at = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._before, self._per_step = self._sent_bytes(), None
        self._first = self._next = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Not at the end of a batch, which other threads may call while a step is traced.
        self._first = batch if self._first < 0 else self._first
        self._next = batch
        if time.monotonic() - self._read_at >= _READ_SECONDS or self._per_step is None:
            self._read()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._next = max(self._next, batch + 1)
        super().on_train_batch_end(batch, self._with_size(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._read()
        super().on_epoch_end(epoch, self._with_size(logs))

    def _read(self) -> None:
        steps = self._next - self._first
        if self._before is not None and steps > 0:
            self._per_step = BytesPerStep(((self._sent_bytes() or 0) - self._before) / steps)
            self._read_at = time.monotonic()

    def _with_size(self, logs: Any) -> dict[str, Any]:
        return {**(logs or {})} if self._per_step is None else {**(logs or {}), _LABEL: self._per_step}


def patch_lists_of_callbacks() -> None:
    """Adds the callbacks of strategies to `fit`, and shows a `CommunicationProgressBar`, on the chief alone.

    A `keras.callbacks.ProgbarLogger` in the user's list of callbacks is left unchanged: every worker shows it then.
    """
    wrap_callback_list("__init__", _create)


def _create(
    call: Callable[..., None],
    callback_list: Any,
    callbacks: Any = None,
    add_history: bool = False,
    add_progbar: bool = False,
    model: Any = None,
    **params: Any,
) -> None:
    strategy: Any = getattr(model, "distribute_strategy", None)
    if is_within_call_of_fit(model) and (added := hooks_of(strategy).fit_callbacks(strategy)):
        callbacks = [*keras.tree.flatten(callbacks or []), *added]
    sent_bytes, bars = hooks_of(strategy).sent_bytes, keras.callbacks.ProgbarLogger
    has_bar = any(isinstance(callback, bars) for callback in keras.tree.flatten(callbacks or []))
    if not add_progbar or has_bar or sent_bytes is None:
        return call(callbacks, add_history, add_progbar, model, **params)
    is_chief = strategy.rank == 0
    call(callbacks, add_history, is_chief, model, **params)
    if is_chief:
        bar = CommunicationProgressBar(functools.partial(sent_bytes, strategy))
        bar.set_model(model)
        bar.set_params(params)
        callback_list.callbacks[:] = [
            bar if type(callback) is bars else callback for callback in callback_list.callbacks
        ]
    return None
