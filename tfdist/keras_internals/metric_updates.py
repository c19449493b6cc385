"""Makes metrics of losses, which a step updates with a scalar, those of the global batch."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.loss_arithmetic import is_scalar, times
from tfdist.keras_internals.loss_scaling import LossStep


def patch_metric_updates(current_step: Callable[[], LossStep | None]) -> None:
    """Makes `keras.metrics.Mean` and `Sum` count a scalar once for the global batch while a step is running.

    A step of one process adds its loss to a `Mean` as one value. Each of several replicas adds a part of the loss, or
    the mean over its own samples; both become the mean, with the replica's fraction of the samples as its weight. So
    the sums over the replicas are the loss, and a count of 1. Whole numbers and booleans are counted as Keras does. A
    scalar that cannot be followed counts as a mean in `Mean`, and as a part in `Sum`.

    May be called more than once, for different steps.
    """
    update_mean, update_sum = keras.metrics.Mean.update_state, keras.metrics.Sum.update_state

    def counts_once(values: Any) -> LossStep | None:
        step = current_step()
        if step is None or values is step.unweighted:
            return None
        if not (isinstance(values, float) or tf.as_dtype(getattr(values, "dtype", tf.int32)).is_floating):
            return None
        shape = getattr(values, "shape", ())
        is_known_scalar = getattr(shape, "rank", len(shape) if isinstance(shape, tuple) else None) == 0
        return step if is_known_scalar and not isinstance(values, (list, tuple)) else None

    @functools.wraps(update_mean)
    def update_mean_by_share(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = counts_once(values)
        if step is None:
            return update_mean(self, values, sample_weight)
        return update_mean(self, step.mean_of(values), _part_of_weight(step, sample_weight))

    @functools.wraps(update_sum)
    def update_sum_by_share(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = counts_once(values)
        mean = None if step is None else step.mean_if_known(values)
        if step is None or mean is None:
            return update_sum(self, values, sample_weight)
        return update_sum(self, times(mean, _part_of_weight(step, sample_weight)))

    keras.metrics.Mean.update_state = update_mean_by_share
    keras.metrics.Sum.update_state = update_sum_by_share


def _part_of_weight(step: LossStep, sample_weight: Any) -> Any:
    """Returns the weight of a scalar as a part: the parts add up to the weight that one process gives the scalar."""
    if sample_weight is None:
        return step.weight
    is_count = isinstance(sample_weight, int) and sample_weight == step.number_of_samples
    if is_count or not is_scalar(sample_weight) or step.degree(sample_weight) != 0:
        return sample_weight
    return times(tf.cast(sample_weight, tf.float32), step.weight)
