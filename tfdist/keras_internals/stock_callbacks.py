"""The state of Keras' callbacks: the attributes that a checkpoint saves, and the files that they write."""

from typing import Any

from keras import callbacks as stock

from tfdist.private_symbols import private

_MonitorCallback = private(
    "keras.src.callbacks.monitor_callback:MonitorCallback", "holds the direction in which a metric improves"
)
private(
    "keras.src.callbacks.monitor_callback:MonitorCallback._set_monitor_op",
    "chooses that direction from the metric's name",
)

# The state of each class; configuration is left to the program. `min_delta` and `monitor_op` are left out on purpose:
# see `find_monitor_direction`.
_STATE_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    stock.EarlyStopping: ("best", "wait", "stopped_epoch", "best_epoch", "best_weights"),
    stock.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    stock.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    stock.History: ("epoch", "history"),
    stock.SwapEMAWeights: ("_ema_weights_in_model",),
    stock.TensorBoard: (
        "_global_train_batch",
        "_global_test_batch",
        "_previous_epoch_iterations",
        "_should_write_train_graph",
    ),
}


def state_attributes(callback: Any) -> tuple[str, ...]:
    """Returns the names of the attributes in which a callback of Keras, or of a subclass, keeps its state."""
    return tuple(name for known, names in _STATE_ATTRIBUTES.items() if isinstance(callback, known) for name in names)


def has_monitor_direction(callback: Any) -> bool:
    """Whether a callback that monitors a quantity has determined whether it should fall or rise."""
    return isinstance(callback, _MonitorCallback) and callback.monitor_op is not None


def find_monitor_direction(callback: Any) -> None:
    """Makes a callback determine that now, instead of at the end of an epoch; it changes the sign of `min_delta`.

    Call this after the model's metrics are built.
    """
    if callback.monitor_op is None:
        callback._set_monitor_op()


def open_files(callback: Any) -> list[Any]:
    """Returns what a callback of Keras has written to and not closed; each has a method `flush`."""
    if isinstance(callback, stock.TensorBoard):
        return list(callback._writers.values())
    if isinstance(callback, stock.CSVLogger) and callback.csv_file is not None and not callback.csv_file.closed:
        return [callback.csv_file]
    return []
