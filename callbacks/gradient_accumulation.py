"""GradientAccumulation: accumulates gradients over micro-steps, in a fixed number or by a schedule of epochs."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks.strategy_support import check_strategies_early, warn_untested_on_tpu
from tfdist.keras_internals.accumulation import Accumulation
from tfdist.training.optimizer_update import apply_updates_with_tfdist, flush
from tfdist.training.strategy_kinds import describe_strategy, suggested_replacement
from tfdist.training.strategy_protocol import training_strategy
from tfdist.utils.argument_checks import is_whole_number


class GradientAccumulation(keras.callbacks.Callback):
    """Sets the number of micro-steps per update, for all epochs or by a schedule.

    `k` micro-steps give the same update as one step on their concatenated batches. Gradients are summed on each
    replica, reduced over all replicas once, then clipped and applied. Learning rate schedules and moving averages
    count updates. A change of the number takes effect at the beginning of an epoch, after an update with the gradients
    accumulated so far. The step is then traced again.

    The callback works without a strategy, under tfdist's strategies, and under TensorFlow's own MirroredStrategy and
    OneDeviceStrategy (`docs/any_strategy.md`). Under the latter two, tfdist applies the optimizer's updates from the
    first such `fit` on.

    Put it first in the list of callbacks, so that the others find the updated weights.

    >>> import keras, numpy as np
    >>> from tfdist.callbacks import GradientAccumulation
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", loss="mse")
    >>> inputs, targets = np.ones([12, 3], "float32"), np.ones([12, 1], "float32")
    >>> history = model.fit(inputs, targets, batch_size=2, verbose=0, callbacks=[GradientAccumulation(3)])
    >>> int(model.optimizer.iterations)
    2
    """

    is_stateless = True  # between steps: the accumulators belong to the optimizer

    def __init__(self, steps: int | Mapping[int, int], *, flush_at_end: bool = False) -> None:
        """Creates the callback.

        Args:
            steps: Number of micro-steps per update, at least 1. Or a schedule: a dictionary from the epoch, counted
                from 0, to the number that holds from that epoch on, such as `{0: 1, 5: 4}`. Before the first epoch of a
                schedule, the model's number holds.
            flush_at_end: Whether a training that ends within an accumulation applies the gradients accumulated so far.
                If not, they stay in the accumulators, the next `fit` continues with them, and a warning says so.

        Raises:
            ValueError: If an epoch or a number of micro-steps is invalid.
        """
        super().__init__()
        self._schedule = _checked(steps)
        self._flush_at_end = flush_at_end
        self._epoch = 0
        check_strategies_early()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise ValueError(
                "Under parameter servers the accumulators would receive the gradient of every micro-step over the "
                "network. Received: GradientAccumulation for a model created under ParameterServerStrategy. Expected: "
                "no such callback. Pass `gradient_accumulation_steps` to `tfdist.strategies.ParameterServerStrategy`: "
                "each worker then sums the gradients of that many batches and pushes once."
            )
        if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
            raise ValueError(
                "This strategy keeps all variables on one device, so that replicas cannot accumulate gradients. "
                f"Received: a model created under {describe_strategy(strategy)}. Expected: a strategy with a copy of "
                f"the variables on each replica. Create the model under `{suggested_replacement(strategy)}`."
            )
        warn_untested_on_tpu(strategy)
        apply_updates_with_tfdist(Accumulation(self.model))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        begun = [start for start in self._schedule if start <= epoch]
        if not begun:
            return
        accumulation = Accumulation(self.model)
        steps = self._schedule[max(begun)]
        if steps != accumulation.steps:
            flush(accumulation)
            accumulation.change(steps)

    def on_test_begin(self, logs: Any = None) -> None:
        self._flush_if_last(stopping=False)  # so that the last validation uses the updated weights

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._flush_if_last(stopping=self.model.stop_training)

    def on_train_end(self, logs: Any = None) -> None:
        accumulation = Accumulation(self.model)
        # By now Keras has replaced the weights by their averages: an update would start from those.
        if self._flush_at_end and not accumulation.averages_weights:
            flush(accumulation)
        remainder = accumulation.remainder
        if remainder and training_strategy(accumulation.strategy).rank == 0:
            warnings.warn(
                f"Training ended after {remainder} of the {accumulation.steps} micro-steps of an update. Their "
                "gradients are not applied. They stay in the optimizer's accumulators, and the next `fit` of this "
                "model continues with them. `GradientAccumulation(..., flush_at_end=True)`, first in the list of "
                "callbacks, applies them.",
                stacklevel=2,
            )

    def _flush_if_last(self, *, stopping: bool) -> None:
        last = self._epoch + 1 >= self.params.get("epochs", 0)
        if self._flush_at_end and (last or stopping):
            flush(Accumulation(self.model))


def _checked(steps: int | Mapping[int, int]) -> dict[int, int]:
    schedule = dict(steps) if isinstance(steps, Mapping) else {0: steps}
    for epoch, micro_steps in schedule.items():
        if not is_whole_number(epoch, at_least=0) or not is_whole_number(micro_steps, at_least=1):
            raise ValueError(
                f"Invalid number of micro-steps, or schedule of them. Received: steps={steps!r}. Expected: a whole "
                "number of at least 1, or a dictionary from epochs, counted from 0, to such numbers, for example "
                "{0: 1, 5: 4}."
            )
    if not schedule:
        raise ValueError("Empty schedule. Received: steps={}. Expected: at least one epoch, for example {0: 4}.")
    return schedule
