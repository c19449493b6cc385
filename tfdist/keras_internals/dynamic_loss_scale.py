"""The dynamic loss scale of mixed precision: halved after an overflow, doubled after enough finite updates."""

import contextvars
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.utils.temporary_values import setting

_loss_scale: contextvars.ContextVar["LossScale | None"] = contextvars.ContextVar("tfdist_loss_scale", default=None)


def current_loss_scale() -> "LossScale | None":
    """Returns the loss scale of the update that is running, if its optimizer has one."""
    return _loss_scale.get()


class LossScale:
    """The dynamic loss scale of a `keras.optimizers.LossScaleOptimizer`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def value(self) -> tf.Tensor:
        """The scale, a float32 scalar."""
        return tf.convert_to_tensor(self._optimizer.dynamic_scale)

    @property
    def variables(self) -> list[Any]:
        """The scale, and the number of finite updates in a row."""
        return [self._optimizer.dynamic_scale, self._optimizer.step_counter]

    def update(self, finite: tf.Tensor) -> None:
        """Doubles the scale after `dynamic_growth_steps` finite updates in a row and halves it after another."""
        optimizer = self._optimizer
        counter = tf.convert_to_tensor(optimizer.step_counter)
        grown = tf.equal(counter, optimizer.dynamic_growth_steps - 1)
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        restarts = tf.logical_or(grown, tf.logical_not(finite))
        optimizer.dynamic_scale.assign(self.value * factor)
        optimizer.step_counter.assign(tf.where(restarts, tf.zeros_like(counter), counter + 1))


def apply_scaled(optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    """Is `LossScaleOptimizer.apply` where tfdist updates the variables.

    The inner optimizer updates with `current_loss_scale()`, because an overflow on one replica is an overflow on all.
    """
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(trainable_variables)
        optimizer.built = True
    with setting(_loss_scale, LossScale(optimizer)):
        optimizer.inner_optimizer.apply(grads, trainable_variables=trainable_variables)
