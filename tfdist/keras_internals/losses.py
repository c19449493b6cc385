"""Losses of a step: scales each replica's loss by its share of the samples of the global batch."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer, compile_utils, losses

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class LossStep(Protocol):
    """The step that runs on this replica, as the losses use it."""

    has_scaled: bool
    parts_of_replica: int

    @property
    def fraction(self) -> Any:
        """The replica's share of the divisor of a mean over the global batch."""

    @property
    def sum_scale(self) -> Any:
        """The factor of a sum over the replica's samples."""

    @property
    def samples_are_static(self) -> bool:
        """Whether the number of the replica's samples is known when the step is traced."""

    def share_of(self, divisor: tf.Tensor) -> Any:
        """A context in which `fraction` is this replica's `divisor` divided by the sum over all replicas."""


def patch_losses(current_step: Callable[[], LossStep | None]) -> None:
    """Makes Keras scale losses by `current_step().fraction` while a step is running.

    Keras divides every mean by the number of replicas, which is right if all replicas have the same number of samples
    (or valid mask entries, or the same sum of weights). Scaled by the fraction of the divisor instead, the sum over the
    replicas is the mean over the global batch, also for the last partial batch, for a worker that has run out of data,
    and with masks.

    May be called more than once, for different steps.
    """
    scale, unscale = losses.scale_loss_for_distribution, losses.unscale_loss_for_distribution
    unscale_output = compile_utils.loss_module.unscale_loss_for_distribution
    reduce_values, reduce_weighted_values = losses.reduce_values, losses.reduce_weighted_values

    @functools.wraps(scale)
    def scale_by_share(value: Any) -> Any:
        step = current_step()
        if step is None:
            return scale(value)
        step.has_scaled = True
        return _times(value, step.fraction)

    @functools.wraps(unscale)
    def unscale_by_share(value: Any) -> Any:
        step = current_step()
        if step is None:
            return unscale(value)
        return _divided(value, step.fraction if _is_scalar(value) else step.sum_scale)

    @functools.wraps(reduce_values)
    def reduce_values_by_share(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
        step = current_step()
        if step is not None and reduction in _MEANS and tuple(values.shape) == ():
            # The user's loss function returns the mean over this replica's samples. Keras does not scale it, so
            # the replicas' gradients would add up to N times the gradient of one process.
            step.has_scaled = True
            return _times(values, step.fraction)
        if step is not None and reduction == "sum":
            step.has_scaled = True
            return _times(reduce_values(values, sample_weight, reduction), step.sum_scale)
        return reduce_values(values, sample_weight, reduction)

    @functools.wraps(reduce_weighted_values)
    def reduce_weighted_values_by_share(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        step = current_step()
        divisor = None if step is None else _own_divisor(sample_weight, mask, reduction)
        if step is None or divisor is None:
            return reduce_weighted_values(values, sample_weight, mask, reduction, dtype)
        with step.share_of(divisor):
            return reduce_weighted_values(values, sample_weight, mask, reduction, dtype)

    def unscale_output_loss(value: Any) -> Any:
        step = current_step()
        if step is None:
            return unscale_output(value)
        if step.samples_are_static:
            return _divided(value, step.fraction) if _is_scalar(value) else value
        parts = tf.distribute.get_strategy().num_replicas_in_sync * step.parts_of_replica
        return value * tf.cast(parts, value.dtype)

    # The mean of an output's loss weights all replicas equally if the batch dimension is not static, so each replica
    # has to contribute its share.
    compile_utils.loss_module = types.SimpleNamespace(unscale_loss_for_distribution=unscale_output_loss)
    _replace(losses, "scale_loss_for_distribution", scale_by_share)
    _replace(losses, "unscale_loss_for_distribution", unscale_by_share)
    compute_loss = TensorFlowTrainer._compute_loss

    @functools.wraps(compute_loss)
    def compute_loss_by_share(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return compute_loss(self, *args, **kwargs)
        step.has_scaled = False
        loss = compute_loss(self, *args, **kwargs)
        if not _is_scalar(loss):  # its gradient is the gradient of its sum
            return _times(loss, step.sum_scale)
        # A custom `compute_loss` that takes the mean itself: no part of it was scaled.
        return loss if step.has_scaled else _times(loss, step.fraction)

    TensorFlowTrainer._compute_loss = compute_loss_by_share
    _replace(losses, "reduce_values", reduce_values_by_share)
    _replace(losses, "reduce_weighted_values", reduce_weighted_values_by_share)


def _replace(module: types.ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a function of Keras, also in modules of Keras that have imported it by name, as Keras 3.16 does."""
    stock = getattr(module, name)
    for user in [user for user in sys.modules.values() if getattr(user, "__name__", "").startswith("keras.src.")]:
        if vars(user).get(name) is stock:
            setattr(user, name, replacement)


def _own_divisor(sample_weight: Any, mask: Any, reduction: str) -> tf.Tensor | None:
    """Returns the divisor of a mean if it is not the number of samples: valid mask entries, or the sum of weights."""
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = losses.apply_mask(sample_weight, mask, dtype="float32", reduction=reduction)
        return tf.reduce_sum(tf.cast(weights, tf.float32))
    if reduction in _MEANS and mask is not None:
        return tf.reduce_sum(tf.cast(mask, tf.float32))
    return None


def means_of_outputs(model: Any) -> list[tuple[Any, Any]]:
    """Returns the variables (total, count) of the mean of each output's loss, if the model has several outputs."""
    compiled = model._compile_loss
    return [] if compiled is None else [(mean.total, mean.count) for mean in compiled.metrics]


def _is_scalar(value: Any) -> bool:
    shape = getattr(value, "shape", ())
    return shape.rank in (0, None) if isinstance(shape, tf.TensorShape) else not len(shape)


def _times(value: Any, fraction: Any) -> Any:
    if _is_one(fraction):
        return value
    # A replica without samples has the fraction 0; its loss, which may be NaN (a mean over nothing), counts as 0.
    value = tf.convert_to_tensor(value)
    return tf.math.multiply_no_nan(value, tf.cast(fraction, value.dtype))


def _divided(value: Any, fraction: Any) -> Any:
    return value if _is_one(fraction) else tf.math.divide_no_nan(value, tf.cast(fraction, value.dtype))


def _is_one(fraction: Any) -> bool:
    return not tf.is_tensor(fraction) and fraction == 1
