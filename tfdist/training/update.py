"""One update of an optimizer over all replicas: accumulate, reduce once, unscale, clip, decay, apply, average."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Exchange
from tfdist.keras_internals.gradients import all_finite, divided, values_of, with_values
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.tensorflow_internals.merge_calls import cond_over_replicas, sum_over_replicas
from tfdist.training.micro_batches import added, current_micro_batch
from tfdist.training.step import current_step


def once_for_all_micro_batches(
    apply: Callable[[list[Any]], None], gradients: list[Any], are_values: Sequence[bool]
) -> None:
    """Calls `apply` with `gradients`, or once for all micro-batches of this replica with their sums.

    Args:
      apply: runs an optimizer's update.
      gradients: of this micro-batch's part of the loss, where there are micro-batches.
      are_values: for each gradient whether it is a new value of its variable (float8's scales) instead, of which the
        largest counts.
    """
    micro_batch = current_micro_batch()
    if micro_batch is None:
        return apply(gradients)
    is_value = [*are_values, *[False] * (len(gradients) - len(are_values))]

    def combined(total: list[Any], new: list[Any]) -> list[Any]:
        sums = added(total, new)
        for position, (a, b) in enumerate(zip(total, new, strict=True)):
            if is_value[position] and a is not None:
                sums[position] = tf.maximum(a, b)
        return sums

    micro_batch.meet("an update", _or_zeros(gradients, is_value), combined, apply)


def _or_zeros(gradients: list[Any], is_value: Sequence[bool]) -> list[Any]:
    """The gradients of a micro-batch that certainly has samples; zeros for those of one that has none."""
    contributes = _contributes()
    if contributes is None:
        return gradients

    def kept(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(kept(gradient.values), gradient.indices, gradient.dense_shape)
        gradient = tf.convert_to_tensor(gradient)
        return tf.cond(contributes, lambda: tf.identity(gradient), lambda: tf.zeros_like(gradient))

    return [
        gradient if gradient is None or value else kept(gradient)
        for gradient, value in zip(gradients, is_value, strict=True)
    ]


def update_over_replicas(optimizer: OptimizerUpdate, gradients: Sequence[Any], exchange: Exchange) -> None:
    """Runs one micro-step, and the update where it is the last one of its update.

    `k` micro-steps on `n` replicas make the update of one step of one process on the `k * n` concatenated batches:
    gradients are summed on the replica, reduced once, then checked, unscaled, clipped and applied. So a gradient
    that overflows on one replica is seen by all of them in the sum, and all of them skip the update and lower the
    loss scale alike, with no replica waiting for another in a branch.

    Args:
      optimizer: the optimizer, with the variables that have a gradient.
      gradients: one a variable, dense or `tf.IndexedSlices`, of the replica's part of the loss.
      exchange: marks the reduction as one of gradients.
    """
    steps = optimizer.accumulation_steps
    if steps == 1:
        reduce_and_apply(optimizer, gradients, exchange, contributes=_contributes(), micro_steps=1)
        return
    accumulators = optimizer.accumulators
    contributes = _contributes()

    def finish() -> None:
        total = [_added(accumulator, gradient) for accumulator, gradient in zip(accumulators, gradients, strict=True)]
        if contributes is not None:
            total = tf.cond(contributes, lambda: total, lambda: [tf.convert_to_tensor(v) for v in accumulators])
        reduce_and_apply(optimizer, total, exchange, contributes=None, micro_steps=steps)
        reset(optimizer)

    def accumulate() -> None:
        for accumulator, gradient in zip(accumulators, gradients, strict=True):
            optimizer.strategy.extended.update(accumulator, _add, args=(gradient,), group=False)

    def accumulate_own() -> None:
        if contributes is None:
            accumulate()
        else:
            tf.cond(contributes, accumulate, lambda: None)

    cond_over_replicas(tf.equal((optimizer.micro_steps + 1) % steps, 0), finish, accumulate_own)


def reduce_and_apply(
    optimizer: OptimizerUpdate,
    gradients: Sequence[Any],
    exchange: Exchange,
    *,
    contributes: tf.Tensor | None,
    micro_steps: int,
) -> None:
    """Sums `gradients`, which `micro_steps` micro-steps have added up, over the replicas and updates the variables."""
    if contributes is not None and tf.executing_eagerly():
        # Eagerly the replicas meet to reduce, where no one's own condition is known.
        gradients = [gradient if contributes else _zeros_like(gradient) for gradient in gradients]
        contributes = None
    loss_scale = optimizer.loss_scale
    divisor: Any = None if micro_steps == 1 else float(micro_steps)
    if loss_scale is not None:
        divisor = loss_scale.value * micro_steps
    # Before the exchange: what a compressor remembers must not depend on a loss scale that changes, nor on how many
    # micro-steps an update is made of.
    if divisor is not None:
        gradients = [divided(gradient, divisor) for gradient in gradients]
    for gradient, shape in zip(gradients, optimizer.shapes, strict=True):
        if not isinstance(gradient, tf.IndexedSlices):
            gradient.set_shape(shape)  # what TensorFlow infers depends on the data that a replica traces for
    with exchange.of_gradients(contributes, optimizer.paths):
        summed = sum_over_replicas(gradients)
    if loss_scale is None:
        optimizer.apply(optimizer.clip(summed))
        return
    finite = all_finite(summed)
    cond_over_replicas(
        finite,
        lambda: optimizer.apply(optimizer.clip(summed)),
        # Keras counts the micro-step after the update; the ones of a skipped update must not count.
        lambda: optimizer.take_back(micro_steps),
    )
    loss_scale.update(finite)


def reset(optimizer: OptimizerUpdate) -> None:
    """Sets the accumulators to zero."""
    for accumulator in optimizer.accumulators:
        optimizer.strategy.extended.update(
            accumulator, lambda variable: variable.assign(tf.zeros_like(variable)), group=False
        )


def _contributes() -> Any:
    """Whether this replica has samples: `None` if it certainly has."""
    step = current_step()
    if step is None or step.contributes is True:
        return None
    return tf.convert_to_tensor(step.contributes)


def _add(accumulator: tf.Variable, gradient: Any) -> None:
    if isinstance(gradient, tf.IndexedSlices):
        accumulator.scatter_add(gradient)
    else:
        accumulator.assign_add(tf.cast(gradient, accumulator.dtype))


def _added(accumulator: tf.Variable, gradient: Any) -> tf.Tensor:
    total = tf.convert_to_tensor(accumulator)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], gradient.values)
    return total + tf.cast(gradient, total.dtype)


def _zeros_like(gradient: Any) -> Any:
    return with_values(gradient, tf.zeros_like(values_of(gradient)))
