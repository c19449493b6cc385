"""Keras' callbacks: wrapping their list, callbacks that know it or run last in it, and the state of Keras' own ones."""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import hooks_of

Wrapper = Callable[..., None]

_MonitorCallback = private(
    "keras.src.callbacks.monitor_callback:MonitorCallback",
    "holds the direction in which a metric improves",
    since="3.11",
    before=(keras.callbacks.EarlyStopping, keras.callbacks.ModelCheckpoint, keras.callbacks.ReduceLROnPlateau),
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


@patch
def wrap_callback_list(method: str, wrapper: Wrapper) -> None:
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
    """

    @property
    def others(self) -> tuple[keras.callbacks.Callback, ...]:
        """The callbacks of its list, except those of this kind."""
        return tuple(callback for callback in self.neighbours if not isinstance(callback, LastCallback))


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
    return isinstance(callback, _MonitorCallback) and getattr(callback, "monitor_op", None) is not None


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
    if (
        isinstance(callback, keras.callbacks.CSVLogger)
        and callback.csv_file is not None
        and not callback.csv_file.closed
    ):
        return [callback.csv_file]
    return []
