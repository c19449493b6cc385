"""ExchangeTimingCallback: the base of callbacks that can have a step take the times of the gradient exchange."""

from typing import Any

from tfdist.keras_internals.keras_callbacks import ListedCallback
from tfdist.training.strategy_protocol import training_strategy


class ExchangeTimingCallback(ListedCallback):
    """A callback that can have the training step take the times of the gradient exchange.

    The first such callback of a list starts the timing, and the last one stops it.

    Attributes:
        timing: Whether this callback asks for times.
    """

    timing = False

    def begin_timing(self) -> None:
        """Starts timing from zero. The step is traced again. Call this in `on_train_begin`."""
        if self._timed_callbacks()[0] is self:
            self._time(True)

    def end_timing(self) -> None:
        """Stops timing. Call this in `on_train_end`."""
        if self._timed_callbacks()[-1] is self:
            self._time(False)

    def _timed_callbacks(self) -> list[Any]:
        listed = self.neighbours or (self,)
        return [
            callback for callback in listed if isinstance(callback, ExchangeTimingCallback) and callback.timing
        ] or [None]  # then no callback is the first or the last one

    def _time(self, enabled: bool) -> None:
        reduction = training_strategy(self.model.distribute_strategy).gradient_reduction
        if reduction is not None:
            reduction.measure_durations(enabled)
            self.model.make_train_function(force=True)
