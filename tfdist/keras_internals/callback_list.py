"""Callbacks that run after all others, and know them."""

import functools
from typing import Any

import keras


class LastCallback(keras.callbacks.Callback):
    """A callback that Keras calls after all others of its list, wherever it stands there.

    So it sees what the others have made of an epoch or a batch, and can put back what they had made.
    """

    others: tuple[keras.callbacks.Callback, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        _install()


def _install() -> None:
    # Keras has no order but that of the list, adds its own callbacks at the end, and tells none of the others.
    begin = keras.callbacks.CallbackList.on_train_begin
    if getattr(begin, "puts_last", False):
        return

    @functools.wraps(begin)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        last = [callback for callback in self.callbacks if isinstance(callback, LastCallback)]
        others = [callback for callback in self.callbacks if not isinstance(callback, LastCallback)]
        for callback in last:
            callback.others = tuple(others)
        self.callbacks[:] = others + last
        begin(self, logs)

    on_train_begin.puts_last = True  # type: ignore[attr-defined]
    keras.callbacks.CallbackList.on_train_begin = on_train_begin
