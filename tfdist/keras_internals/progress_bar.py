"""Keras' progress bar, once for all workers, with what a step sends."""

import functools
import time
from collections.abc import Callable
from typing import Any

import keras

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_READ_SECONDS = 0.5  # a bar that moves needs no newer number


class SizePerStep(float):
    """A number of bytes that prints itself in its largest unit, as Keras' bar knows numbers only.

    >>> f"{SizePerStep(1234567) / 1:.4f}"
    '1.2 MB/step'
    """

    def __truediv__(self, other: Any) -> "SizePerStep":
        return SizePerStep(float(self) / other)

    def __format__(self, spec: str) -> str:
        size, unit = next(((size, unit) for size, unit in _UNITS if self >= size), (1.0, "B"))
        return f"{float(self) / size:.{0 if unit == 'B' else 1}f} {unit}/step"


class SendingProgressBar(keras.callbacks.ProgbarLogger):
    """Keras' bar, to which the bytes of gradients are added that a step has sent; no other callback sees them."""

    def __init__(self, sent_bytes: Callable[[], int | None]) -> None:
        """Takes what counts the bytes that were sent so far; `None` where there is nothing to tell."""
        super().__init__()
        self._sent_bytes = sent_bytes
        self._before: int | None = None
        self._first = self._next = 0  # steps of the epoch: the first that this `fit` has made, and the next one
        self._per_step: SizePerStep | None = None
        self._read_at = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._before, self._per_step = self._sent_bytes(), None
        self._first = self._next = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Here, as the ends of batches may be called from other threads, while a step is traced.
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
            self._per_step = SizePerStep(((self._sent_bytes() or 0) - self._before) / steps)
            self._read_at = time.monotonic()

    def _with_size(self, logs: Any) -> dict[str, Any]:
        return {**(logs or {})} if self._per_step is None else {**(logs or {}), "sent": self._per_step}


def install_progress_bar(is_ours: Callable[[Any], bool], sent_bytes: Callable[[Any], int | None]) -> None:
    """Makes `fit`, `evaluate` and `predict` show their progress on the chief alone, in a `SendingProgressBar`.

    A `keras.callbacks.ProgbarLogger` in the user's list of callbacks is left alone: every worker shows it then.

    Args:
      is_ours: whether a strategy is one of tfdist's.
      sent_bytes: the bytes of gradients that this process has sent so far under a strategy, or `None`.
    """
    stock = keras.callbacks.CallbackList.__init__
    bars = keras.callbacks.ProgbarLogger

    @functools.wraps(stock)
    def init(
        self: Any,
        callbacks: Any = None,
        add_history: bool = False,
        add_progbar: bool = False,
        model: Any = None,
        **more: Any,
    ) -> None:
        strategy = getattr(model, "distribute_strategy", None)
        is_asked_for = any(isinstance(callback, bars) for callback in keras.tree.flatten(callbacks or []))
        if not add_progbar or is_asked_for or not is_ours(strategy):
            return stock(self, callbacks, add_history, add_progbar, model, **more)
        is_chief = getattr(strategy, "rank", 0) == 0
        stock(self, callbacks, add_history, is_chief, model, **more)
        if is_chief:
            bar = SendingProgressBar(lambda: sent_bytes(strategy))
            bar.set_model(model)
            bar.set_params(more)
            self.callbacks[:] = [bar if type(callback) is bars else callback for callback in self.callbacks]
        return None

    keras.callbacks.CallbackList.__init__ = init
