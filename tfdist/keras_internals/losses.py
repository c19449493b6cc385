"""Scales each replica's losses, and its metrics of losses, by its share of the samples of the global batch."""

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer, compile_utils, is_in_layer_call, losses
from tfdist.keras_internals.model_introspection import added_losses
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import of_running_step
from tfdist.tensorflow_internals.function_graphs import is_symbolic


def is_scalar(value: Any) -> bool:
    """Whether a tensor or number has the rank 0, or a rank that is not known."""
    shape = getattr(value, "shape", ())
    return shape.rank in (0, None) if isinstance(shape, tf.TensorShape) else not len(shape)


def times(value: Any, fraction: Any) -> Any:
    """Returns `value * fraction`; 0 where `fraction` is 0, whatever `value` is.

    A replica without samples has the fraction 0; its loss, which may be NaN (a mean over nothing), counts as 0.
    """
    if is_one(fraction):
        return value
    value = tf.convert_to_tensor(value)
    return tf.math.multiply_no_nan(value, tf.cast(fraction, value.dtype))


def divided(value: Any, fraction: Any) -> Any:
    """Returns `value / fraction`; 0 where `fraction` is 0."""
    return value if is_one(fraction) else tf.math.divide_no_nan(value, tf.cast(fraction, value.dtype))


def is_one(fraction: Any) -> bool:
    """Whether a factor is the number 1, and no tensor."""
    return not tf.is_tensor(fraction) and fraction == 1


LossStep = Any  # of `tfdist.losses.loss_scaling`, which follows the losses of a step
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def current_step() -> LossStep | None:
    """Returns how the losses of the step that is running are scaled; `None` outside of a step."""
    return of_running_step(lambda hooks: hooks.current_step())


@patch
def patch_losses() -> None:
    """Makes Keras, its metrics and gradient tapes scale losses by `current_step().fraction` while a step is running.

    Keras divides every mean by the number of replicas, which is right if all replicas have the same number of samples
    (or valid mask entries, or the same sum of weights). Scaled by the fraction of the divisor instead, the sum over the
    replicas is the mean over the global batch, also for the last partial batch, for a worker that has run out of data,
    and with masks.

    In a layer's `call` a loss stays a mean over the replica's samples, because `add_loss`, for which layers compute
    losses, scales it: `scale(loss)` and `scale(0.1 * loss + penalty)` are right, those of scaled parts are not.
    """
    scale, unscale = losses.scale_loss_for_distribution, losses.unscale_loss_for_distribution
    unscale_output = compile_utils.loss_module.unscale_loss_for_distribution
    reduce_values, reduce_weighted_values = losses.reduce_values, losses.reduce_weighted_values

    @_replace("scale_loss_for_distribution")
    def scale_by_share(value: Any) -> Any:
        step = current_step()
        if step is None:
            return scale(value)
        return _scaled(step, value, step.fraction)

    @_replace("unscale_loss_for_distribution")
    def unscale_by_share(value: Any) -> Any:
        step = current_step()
        if step is None:
            return unscale(value)
        if is_scalar(value):
            return step.mark(divided(value, step.fraction), 0)
        return divided(value, step.sum_scale if step.holds_samples(value) else step.fraction)

    @_replace("reduce_values")
    def reduce_values_by_share(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
        step = current_step()
        if step is not None and reduction in (*_MEANS, "sum") and tuple(values.shape) == ():
            # The user's loss function returns a scalar, mostly the mean over this replica's samples. Keras neither
            # scales nor reduces it, so the replicas' gradients would add up to N times the gradient of one process.
            part = step.as_part(values, is_mean=True)
            return step.mark(divided(part, step.mean_scale), 0) if is_in_layer_call() else part
        if step is not None and reduction == "sum":
            return _scaled(step, reduce_values(values, sample_weight, reduction), step.sum_scale)
        return reduce_values(values, sample_weight, reduction)

    @_replace("reduce_weighted_values")
    def reduce_weighted_values_by_share(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        step = current_step()
        if step is not None:
            step.check_samples(values)
        divisor = None if step is None else _own_divisor(sample_weight, mask, reduction)

        def weighted(values: Any) -> Any:
            with contextlib.nullcontext() if step is None or divisor is None else step.share_of(divisor):
                return reduce_weighted_values(values, sample_weight, mask, reduction, dtype)

        has_weights = sample_weight is not None or mask is not None
        if step is None or not step.has_totals or not (has_weights and is_scalar(values) and is_symbolic(values)):
            return weighted(values)
        if is_in_layer_call():
            return weighted(values)
        # Keras multiplies the scalar of a loss function with the mean, or sum, of the weights of all samples.
        factor = step.total_of(weighted(tf.ones([], values.dtype)))
        return step.mark_scaled(times(step.as_part(values, is_mean=True), factor))

    def unscale_output_loss(value: Any) -> Any:
        step = current_step()
        if step is None:
            return unscale_output(value)
        if step.samples_are_static:
            unscaled = divided(value, step.fraction) if is_scalar(value) else value
        else:
            parts = (step.replicas or tf.distribute.get_strategy().num_replicas_in_sync) * step.parts_of_replica
            unscaled = value * tf.cast(parts, value.dtype)
        step.unweighted = unscaled
        return unscaled

    # The mean of an output's loss weights all replicas equally if the batch dimension is not static, so each replica
    # has to contribute its share.
    replace(compile_utils, "loss_module")(types.SimpleNamespace(unscale_loss_for_distribution=unscale_output_loss))
    compute_loss = TensorFlowTrainer._compute_loss

    @replace(TensorFlowTrainer, "_compute_loss")
    def compute_loss_by_share(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return compute_loss(self, *args, **kwargs)
        step.has_scaled = False
        loss = compute_loss(self, *args, **kwargs)
        # A custom `compute_loss` may take the mean itself.
        return step.as_part(loss, is_mean=not step.has_scaled)

    model_loss = keras.Model.compute_loss

    @replace(keras.Model, "compute_loss")
    def model_loss_by_share(self: Any, *args: Any, **kwargs: Any) -> Any:
        step, loss = current_step(), model_loss(self, *args, **kwargs)
        # With `reduction="none"` it has a value for each sample, which Keras does not scale.
        return loss if step is None or loss is None or not is_scalar(loss) else step.mark_scaled(loss)

    aggregate = TensorFlowTrainer._aggregate_additional_loss

    @replace(TensorFlowTrainer, "_aggregate_additional_loss")
    def aggregate_by_share(self: Any, loss: Any) -> Any:
        step = current_step()
        if step is None:
            return aggregate(self, loss)
        is_penalty = not any(loss is layer_loss for of_layer in added_losses(self).values() for layer_loss in of_layer)
        loss = loss if loss.dtype.is_floating else tf.cast(loss, keras.config.floatx())
        return step.mark_scaled(tf.reduce_sum(step.as_part(loss, is_mean=True, is_certain=is_penalty)))

    _patch_own_calls()
    _patch_metric_updates()
    _patch_layer_outputs()
    _patch_gradient_tapes()


@patch
def _patch_own_calls() -> None:
    """Makes compiled losses whose class overrides `__call__` return a part, since no reduction of Keras scales them."""
    get_loss = compile_utils.get_loss

    @replace(compile_utils, "get_loss")
    def get_loss_by_share(*args: Any, **kwargs: Any) -> Any:
        loss = get_loss(*args, **kwargs)
        is_reduced = loss is None or type(loss).__call__ is keras.losses.Loss.__call__
        return loss if is_reduced else _OwnCall(loss)


class _OwnCall:
    """A loss that computes the loss of a batch itself."""

    def __init__(self, loss: Any) -> None:
        self.name = getattr(loss, "name", None)
        self._loss = loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return self._loss(*args, **kwargs)
        others_have_scaled, step.has_scaled = step.has_scaled, False
        loss = self._loss(*args, **kwargs)
        if is_scalar(loss):  # values of samples are scaled with the loss of the model
            loss = step.as_part(loss, is_mean=not step.has_scaled)
        step.has_scaled |= others_have_scaled
        return loss


def _replace(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a function of losses, also in modules of Keras that have imported it by name, as Keras 3.16 does."""

    def put(replacement: Callable[..., Any]) -> Callable[..., Any]:
        stock = getattr(losses, name)
        for user in [user for user in sys.modules.values() if getattr(user, "__name__", "").startswith("keras.src.")]:
            if vars(user).get(name) is stock:
                replace(user, name)(replacement)
        return replacement

    return put


def _scaled(step: LossStep, value: Any, scale: Any) -> Any:
    """Returns a mean or a sum over the replica's samples as a part, or as a mean in a layer's call."""
    if not is_in_layer_call():
        return step.mark_scaled(times(value, scale))
    if scale is not step.mean_scale:
        value = divided(times(value, scale), step.mean_scale)
    return step.mark(value, 0)


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


@patch
def _patch_layer_outputs() -> None:
    """Makes batch normalization and scaled losses known to `current_step()` while a step is running.

    Normalized samples count as values of these samples alone: the statistics of a batch are those of the replica, which
    Keras documents, or those of all replicas. A scaled loss in a mixed precision is the loss.
    """
    normalize, scale_loss = keras.layers.BatchNormalization.call, keras.optimizers.LossScaleOptimizer.scale_loss

    @replace(keras.layers.BatchNormalization, "call")
    def normalize_samples(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step, outputs = current_step(), normalize(self, inputs, *args, **kwargs)
        if step is not None:
            step.mark_samples(outputs, inputs)
        return outputs

    @replace(keras.optimizers.LossScaleOptimizer, "scale_loss")
    def scale_known_loss(self: Any, loss: Any) -> Any:
        step, scaled = current_step(), scale_loss(self, loss)
        return scaled if step is None else step.mark_like(scaled, loss)


@patch
def _patch_metric_updates() -> None:
    """Makes `keras.metrics.Mean` and `Sum` count a scalar once for the global batch while a step is running.

    A step of one process adds its loss to a `Mean` as one value. Each of several replicas adds a part of the loss, or
    the mean over its own samples; both become the mean, with the replica's fraction of the samples as its weight. So
    the sums over the replicas are the loss, and a count of 1. Whole numbers and booleans are counted as Keras does. A
    scalar that cannot be followed counts as a mean in `Mean`, and as a part in `Sum`.
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

    @replace(keras.metrics.Mean, "update_state")
    def update_mean_by_share(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = counts_once(values)
        mean = values if step is None else step.mean_of(values)
        if self.name == "loss" and (present := current_step()) is not None:
            present.logged_loss = tf.reduce_mean(mean)
        if step is None:
            return update_mean(self, values, sample_weight)
        return update_mean(self, mean, _part_of_weight(step, sample_weight))

    @replace(keras.metrics.Sum, "update_state")
    def update_sum_by_share(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = counts_once(values)
        mean = None if step is None else step.mean_if_known(values)
        if step is None or mean is None:
            return update_sum(self, values, sample_weight)
        return update_sum(self, times(mean, _part_of_weight(step, sample_weight)))


def _part_of_weight(step: LossStep, sample_weight: Any) -> Any:
    """Returns the weight of a scalar as a part: the parts add up to the weight that one process gives the scalar."""
    if sample_weight is None:
        return step.weight
    is_count = isinstance(sample_weight, int) and sample_weight == step.number_of_samples
    if is_count or not is_scalar(sample_weight) or step.degree(sample_weight) != 0:
        return sample_weight
    return times(tf.cast(sample_weight, tf.float32), step.weight)


@patch
def _patch_gradient_tapes() -> None:
    """Makes tapes and `tf.gradients` differentiate a step's `parts_of_gradient` if the sources contain a variable.

    Gradients with respect to tensors (a gradient penalty, an adversarial example) are unchanged.
    """
    gradient, of_graph = tf.GradientTape.gradient, tf.gradients

    @replace(tf.GradientTape, "gradient")
    def gradient_of_parts(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        parts = _parts(target, sources, output_gradients)
        if parts is not None:
            target, output_gradients = [tensor for tensor, _ in parts], [scale for _, scale in parts]
        return gradient(self, target, sources, output_gradients, unconnected_gradients)

    @replace(tf, "gradients")
    def gradients_of_parts(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        parts = _parts(ys, xs, grad_ys)
        if parts is None:
            return of_graph(ys, xs, grad_ys, *args, **kwargs)
        return of_graph([tensor for tensor, _ in parts], xs, [scale for _, scale in parts], *args, **kwargs)


def _parts(targets: Any, sources: Any, gradients: Any) -> list[tuple[Any, Any]] | None:
    step = current_step() if _has_variable(sources) else None
    output_gradients = None if gradients is None else tf.nest.flatten(gradients)
    return None if step is None else step.parts_of_gradient(tf.nest.flatten(targets), output_gradients)


def _has_variable(sources: Any) -> bool:
    # A variable that a worker has pulled in another dtype has no `handle`; `tf.gradients` takes handles.
    leaves = tf.nest.flatten(sources)
    return any(hasattr(leaf, "trainable") or getattr(leaf, "dtype", None) == tf.resource for leaf in leaves)
