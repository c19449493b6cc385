"""Scales the losses of a micro-batch so that the sum over all micro-batches is the loss of the batch.

A mean over the samples is multiplied by the micro-batch's fraction of the samples, a sum by 1. A mean may also divide
by something else, such as the number of valid entries of a mask, or the sum of weights. A stage computes the divisor of
its micro-batch, but the backward pass of the first micro-batch begins before the last one has arrived. So the divisors
of the batch are computed beforehand, from masks, targets and weights alone.
"""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.losses.loss_scaling import LossStep
from tfdist.tensorflow_internals.factors import times

_current: contextvars.ContextVar["_PartLoss | None"] = contextvars.ContextVar("tfdist_stage_loss", default=None)


def current_stage_loss() -> "_PartLoss | None":
    """Returns how the losses of the stage that is being traced are scaled, or None."""
    return _current.get()


class _PartLoss(LossStep):
    """How losses of a part of a batch are scaled.

    Attributes:
        num_divisors: The number of divisors, other than the number of samples, that were used so far.
    """

    has_totals = True
    samples_are_static = False  # the loss of an output stays a part

    def __init__(self, fraction: tf.Tensor, is_real: tf.Tensor, samples: Any) -> None:
        self.fraction, self._fraction_of_samples = fraction, fraction
        self.sum_scale = is_real
        self._samples = samples
        self.num_divisors = 0

    @property
    def mean_scale(self) -> Any:
        """The fraction of the samples of the batch."""
        return self._fraction_of_samples

    @property
    def number_of_samples(self) -> Any:
        """The number of rows of the micro-batch."""
        return self._samples

    @contextmanager
    def running(self, data: Any) -> Iterator[None]:
        """Scales the losses that are computed in the body from `data`, tensors whose first axis holds the samples."""
        self.observe(data, self._samples)
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def share_of(self, divisor: tf.Tensor) -> Iterator[None]:
        """Sets `fraction` to this part's share of `divisor`, a float32 scalar, of the batch."""
        before = self.fraction
        divisor = times(tf.stop_gradient(divisor), self.sum_scale)
        self.fraction = tf.math.divide_no_nan(divisor, self.total_of(divisor))
        try:
            yield
        finally:
            self.fraction = before

    def total_of(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum over all micro-batches of `value`, a float scalar."""
        self.num_divisors += 1
        return self._total(tf.cast(tf.stop_gradient(value), tf.float32))

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError


class MicroBatchLoss(_PartLoss):
    """Scales the losses of a micro-batch.

    Attributes:
        recomputes: Whether the backward pass computes rematerialized functions again.
    """

    recomputes = True

    def __init__(self, fraction: tf.Tensor, is_real: tf.Tensor, samples: Any, divisors: tf.Tensor) -> None:
        """Creates the scaling.

        Args:
            fraction: The samples of the micro-batch divided by those of the batch, a float32 scalar.
            is_real: 1, or 0 if the micro-batch has no samples and computes on those of another one; float32.
            samples: The number of rows, an int or an int32 scalar.
            divisors: Those of the batch, in the order in which the losses use them, a float32 vector.
        """
        super().__init__(fraction, is_real, samples)
        self._divisors = divisors

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        return self._divisors[self.num_divisors - 1]


class DivisorRecording(_PartLoss):
    """Records the divisors of a complete batch.

    Attributes:
        divisors: float32 scalars, in the order in which the losses use them.
    """

    def __init__(self, samples: tf.Tensor) -> None:
        """Creates the recording; `samples` is the number of rows of the batch, an int32 scalar."""
        super().__init__(tf.constant(1.0), tf.constant(1.0), samples)
        self.divisors: list[tf.Tensor] = []

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        self.divisors.append(value)
        return value
