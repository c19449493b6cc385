"""Keras' progress bar, shown on the chief alone, with the number of bytes that a step sends."""

import functools
import time
from collections.abc import Callable
from typing import Any

import keras

from tfdist.keras_internals.keras_callbacks import wrap_callback_list
from tfdist.private_symbols import has_reached
from tfdist.strategy_hooks import hooks_of

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_READ_SECONDS = 0.5  # how often a moving bar reads the counters
# Older versions of the bar turn each value into a plain number, which cannot show its unit.
_LABEL = "sent" if has_reached("keras", "3.12") else "sent_bytes_per_step"


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


def patch_progress_bar() -> None:
    """Makes `fit`, `evaluate` and `predict` show a `CommunicationProgressBar`, on the chief alone.

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
