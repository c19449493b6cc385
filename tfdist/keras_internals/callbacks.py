"""What Keras' own callbacks remember from step to step and from epoch to epoch."""

from typing import Any

import keras

from tfdist.private_symbols import private

_MonitorCallback = private("keras.src.callbacks.monitor_callback:MonitorCallback", "knows which direction is better")
private("keras.src.callbacks.monitor_callback:MonitorCallback._set_monitor_op", "finds out which direction is better")
_known = keras.callbacks

# What each of them needs to go on; configuration stays as the program gives it. `min_delta` and `monitor_op` are left
# out on purpose: see `find_direction`.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    _known.EarlyStopping: ("best", "wait", "stopped_epoch", "best_epoch", "best_weights"),
    _known.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    _known.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    _known.History: ("epoch", "history"),
    _known.SwapEMAWeights: ("_ema_weights_in_model",),
    _known.TensorBoard: (
        "_global_train_batch",
        "_global_test_batch",
        "_previous_epoch_iterations",
        "_should_write_train_graph",
    ),
}


def attributes_of(callback: Any) -> tuple[str, ...]:
    """The names of the attributes in which a callback of Keras, or of a subclass, keeps its state."""
    return tuple(name for known, names in _ATTRIBUTES.items() if isinstance(callback, known) for name in names)


def knows_direction(callback: Any) -> bool:
    """Whether a callback that watches a quantity has found out whether it should fall or rise."""
    return isinstance(callback, _MonitorCallback) and callback.monitor_op is not None


def find_direction(callback: Any) -> None:
    """Has a callback find that out now, as it will need it before the end of an epoch; it changes `min_delta`'s sign.

    To be called once the model's metrics are built.
    """
    if callback.monitor_op is None:
        callback._set_monitor_op()


def open_files(callback: Any) -> list[Any]:
    """What a callback of Keras has written to and not closed; each has a method `flush`."""
    if isinstance(callback, _known.TensorBoard):
        return list(callback._writers.values())
    if isinstance(callback, _known.CSVLogger) and callback.csv_file is not None and not callback.csv_file.closed:
        return [callback.csv_file]
    return []
