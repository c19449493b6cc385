"""Gradient accumulation for a model that was compiled without it, or that changes while training."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks.other_strategies import check_early, described, replacement_of, tell_of_tpus
from tfdist.keras_internals.accumulation import Accumulation
from tfdist.training.flush import flush
from tfdist.training.take_over import take_over


class GradientAccumulation(keras.callbacks.Callback):
    """Sets how many micro-steps make an update, for the whole training or by epochs.

    `k` micro-steps make the update of one step on their concatenated batches: gradients are summed on each replica,
    reduced over all replicas once, then clipped and applied; schedules and moving averages count updates. A change
    takes effect at the beginning of an epoch, after an update of whatever was accumulated, and traces the step anew.

    It works without a strategy, under tfdist's, and under TensorFlow's own MirroredStrategy and OneDeviceStrategy
    (`docs/any_strategy.md`), where tfdist makes the optimizer's updates from the first such `fit` on.

    Put it first in the list of callbacks, so that others find the updated weights.

    >>> import keras, numpy as np
    >>> from tfdist.callbacks import GradientAccumulation
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", loss="mse")
    >>> inputs, targets = np.ones([12, 3], "float32"), np.ones([12, 1], "float32")
    >>> history = model.fit(inputs, targets, batch_size=2, verbose=0, callbacks=[GradientAccumulation(3)])
    >>> int(model.optimizer.iterations)
    2
    """

    remembers_nothing = True  # between steps; accumulators are the optimizer's

    def __init__(self, steps: int | Mapping[int, int], *, flush_at_end: bool = False) -> None:
        """Describes the accumulation.

        Args:
          steps: the micro-steps of an update, 1 or more; or a schedule of them by the epoch, from 0, in which they
            begin to hold: `{0: 1, 5: 4}`. Before the first epoch of a schedule the model's own number holds.
          flush_at_end: whether a training that ends within an accumulation makes an update of what is there. If not,
            it stays in the accumulators, where the next `fit` goes on; a warning says so.

        Raises:
          ValueError: an epoch or a number of micro-steps is not what is expected.
        """
        super().__init__()
        self._schedule = _checked(steps)
        self._flush_at_end = flush_at_end
        self._epoch = 0
        check_early()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise ValueError(
                "Accumulators on parameter servers would take every micro-step's gradient across the network. "
                "Received: GradientAccumulation for a model made under ParameterServerStrategy. Expected: no such "
                "callback. Give `accumulation_steps` to `tfdist.strategies.ParameterServerStrategy`: each worker then "
                "adds up that many batches and pushes once."
            )
        if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
            raise ValueError(
                "The variables of this strategy lie on one device, so that no replica has accumulators of its own. "
                f"Received: a model made under {described(strategy)}. Expected: a strategy whose replicas have their "
                f"own copies. Make the model under `{replacement_of(strategy)}`."
            )
        tell_of_tpus(strategy)
        take_over(Accumulation(self.model))

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
        self._flush_if_last(stopping=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._flush_if_last(stopping=self.model.stop_training)

    def on_train_end(self, logs: Any = None) -> None:
        accumulation = Accumulation(self.model)
        # Keras has put the averages in the weights' place by now: an update would start from these.
        if self._flush_at_end and not accumulation.averages_weights:
            flush(accumulation)
        remainder = accumulation.remainder
        if remainder and getattr(accumulation.strategy, "rank", 0) == 0:
            warnings.warn(
                f"Training ended after {remainder} of the {accumulation.steps} micro-steps of an update. They are "
                "not applied; they stay in the optimizer's accumulators and count in the next `fit` of this model. "
                "`GradientAccumulation(..., flush_at_end=True)`, first in the list of callbacks, applies them.",
                stacklevel=2,
            )

    def _flush_if_last(self, *, stopping: bool) -> None:
        last = self._epoch + 1 >= self.params.get("epochs", 0)
        if self._flush_at_end and (last or stopping):
            flush(Accumulation(self.model))


def _checked(steps: int | Mapping[int, int]) -> dict[int, int]:
    schedule = dict(steps) if isinstance(steps, Mapping) else {0: steps}
    for epoch, micro_steps in schedule.items():
        if not _is_int(epoch) or epoch < 0 or not _is_int(micro_steps) or micro_steps < 1:
            raise ValueError(
                f"`steps` is not a number of micro-steps or a schedule of them. Received: steps={steps!r}. "
                "Expected: an integer of 1 or more, or a dictionary of such integers by the epoch, from 0, in which "
                "they begin to hold, such as {0: 1, 5: 4}."
            )
    if not schedule:
        raise ValueError(
            "`steps` is an empty schedule. Received: steps={}. Expected: at least one epoch, such as {0: 4}."
        )
    return schedule


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
