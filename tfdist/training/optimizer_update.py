"""One optimizer update over all replicas: accumulate, reduce once, unscale, clip, decay, apply, average."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReductionContext
from tfdist.compression.gradient_tensors import all_finite, divided, with_shape, zeros_unless
from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.optimizers import OptimizerUpdate, update_by, update_hooks
from tfdist.sharded_state.sharded_update import ShardedUpdate, sharded_update
from tfdist.strategy_hooks import UpdateHooks
from tfdist.tensorflow_internals.merge_calls import cond_over_replicas, sum_over_replicas
from tfdist.tensorflow_internals.shared_operations import shared_operations
from tfdist.training.micro_batches import current_micro_batch, sum_pairwise
from tfdist.training.sample_shares import compiles_updates, current_step, current_timing
from tfdist.training.strategy_protocol import is_tfdist_strategy, training_strategy


def apply_once_for_micro_batches(
    apply: Callable[[list[Any]], None], gradients: list[Any], are_values: Sequence[bool]
) -> None:
    """Calls `apply` with `gradients`, or once for all micro-batches of this replica with the sums of theirs.

    Args:
        apply: Runs an optimizer's update.
        gradients: Of this micro-batch's part of the loss, if the step is computed in micro-batches.
        are_values: For each gradient whether it is instead a new value of its variable (a float8 scale). The largest
            value of all micro-batches is used.
    """
    micro_batch = current_micro_batch()
    if micro_batch is None:
        return apply(gradients)
    is_value = [*are_values, *[False] * (len(gradients) - len(are_values))]

    def combine(total: list[Any], new: list[Any]) -> list[Any]:
        sums = sum_pairwise(total, new)
        for position, (a, b) in enumerate(zip(total, new, strict=True)):
            if is_value[position] and a is not None:
                sums[position] = tf.maximum(a, b)
        return sums

    contributes = _contributes()
    own = [
        gradient if gradient is None or value else zeros_unless(contributes, gradient)
        for gradient, value in zip(gradients, is_value, strict=True)
    ]
    micro_batch.synchronize("an update", own, combine, apply)


def update_over_replicas(
    optimizer: OptimizerUpdate, gradients: Sequence[Any], context: ReductionContext, *, may_compile: bool = True
) -> None:
    """Runs one micro-step, and the update if it is the last micro-step of an update.

    `k` micro-steps on `n` replicas compute the update of one step of one process on the `k * n` concatenated batches:
    gradients are summed on the replica, reduced once, then checked, unscaled, clipped and applied. If a gradient
    overflows on one replica, all replicas see it in the sum, and all of them skip the update and lower the loss scale.
    No replica waits for another in a branch.

    Args:
        optimizer: The optimizer, with the variables that have a gradient.
        gradients: One for each variable, dense or `tf.IndexedSlices`, of the replica's part of the loss.
        context: Marks the reduction as one of gradients.
        may_compile: Whether XLA may compile updates.
    """
    if (timing := current_timing()) is not None:
        timing.gradients_ready(gradients)
    steps = optimizer.accumulation_steps
    local = _local_update(optimizer)
    if local is not None:
        gradients = local.take(gradients)
    compiles = compiles_updates() if may_compile else False
    reduce_and_apply = functools.partial(_reduce_and_apply, compiles=compiles)
    if steps == 1:
        reduce_and_apply(optimizer, gradients, context, contributes=_contributes(), micro_steps=1)
        return
    sharded = sharded_update(optimizer)
    if sharded is not None and sharded.has_split_accumulators:
        _accumulate_parts(optimizer, sharded, gradients, context, steps=steps, compiles=compiles)
        return
    accumulators = optimizer.accumulators
    contributes = _contributes()

    def finish() -> None:
        total = [added(accumulator, gradient) for accumulator, gradient in zip(accumulators, gradients, strict=True)]
        if contributes is not None:
            total = tf.cond(contributes, lambda: total, lambda: [tf.convert_to_tensor(v) for v in accumulators])
        reduce_and_apply(optimizer, total, context, contributes=None, micro_steps=steps)
        _reset(optimizer)

    def accumulate() -> None:
        for accumulator, gradient in zip(accumulators, gradients, strict=True):
            optimizer.strategy.extended.update(accumulator, add, args=(gradient,), group=False)

    def accumulate_own() -> None:
        if contributes is None:
            accumulate()
        else:
            tf.cond(contributes, accumulate, lambda: None)

    cond_over_replicas(tf.equal((optimizer.micro_steps + 1) % steps, 0), finish, accumulate_own)


def _accumulate_parts(
    optimizer: OptimizerUpdate,
    sharded: ShardedUpdate,
    gradients: Sequence[Any],
    context: ReductionContext,
    *,
    steps: int,
    compiles: bool | None,
) -> None:
    """Runs one micro-step whose gradients are summed over the replicas, each of which keeps the sums of its part."""
    # Sums are of the scaled loss, as without sharding; what a compressor sees does not depend on the scale.
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.value
    parts = _reduce(optimizer, sharded, gradients, context, _contributes(), scale)
    if scale is not None:
        parts = {position: part * tf.cast(scale, part.dtype) for position, part in parts.items()}

    def finish() -> None:
        total = _divided_parts(sharded.accumulated(parts), _divisor(optimizer, steps))
        _apply(optimizer, sharded, total, micro_steps=steps, compiles=compiles)
        sharded.reset_accumulators()

    is_last = tf.equal((optimizer.micro_steps + 1) % steps, 0)
    cond_over_replicas(is_last, finish, lambda: sharded.accumulate(parts))


def _local_update(optimizer: OptimizerUpdate) -> Any:
    """Returns how the worker updates by itself between two exchanges, or `None` under other strategies."""
    updates = training_strategy(optimizer.strategy).local_updates
    return None if updates is None else updates.of(optimizer)


def flush(accumulation: Accumulation) -> int:
    """Applies the mean over the micro-steps that were accumulated since the last update.

    Call this eagerly and on all workers, under a strategy of tfdist or after `apply_updates_with_tfdist`.

    Returns:
        The number of micro-steps in the update; 0 if there was nothing to apply.
    """
    micro_steps = accumulation.remainder
    if not micro_steps:
        return 0
    strategy = accumulation.strategy
    reduction = training_strategy(strategy).gradient_reduction
    context = ReductionContext() if reduction is None else reduction.context

    def flush_replica() -> None:
        update = accumulation.update()
        sharded = sharded_update(update)
        if sharded is not None and sharded.has_split_accumulators:
            total = _divided_parts(sharded.accumulated(), _divisor(update, micro_steps))
            _apply(update, sharded, total, micro_steps=micro_steps)
            sharded.reset_accumulators()
        else:
            accumulated = [tf.convert_to_tensor(accumulator) for accumulator in update.accumulators]
            _reduce_and_apply(update, accumulated, context, contributes=None, micro_steps=micro_steps)
            _reset(update)
        for variable in update.constrained_variables:
            variable.assign(variable.constraint(variable))

    tf.function(lambda: strategy.run(flush_replica), autograph=False)()
    accumulation.complete()
    if (updates := training_strategy(strategy).local_updates) is not None:
        updates.synchronize()
    return micro_steps


def apply_updates_with_tfdist(accumulation: Accumulation) -> None:
    """Replaces the updates of a model's optimizer by `update_over_replicas`, permanently, from its next step on.

    For models that were created under a strategy of TensorFlow: Keras' own accumulation cannot run on its replicas,
    evaluates schedules by micro-steps, and averages the weights in each micro-step. Under strategies of tfdist nothing
    changes.
    """
    if is_tfdist_strategy(accumulation.strategy) or update_hooks(accumulation.optimizers[0]) is not None:
        return
    for one in accumulation.optimizers:
        update_by(one, UpdateHooks(_update_stock, apply_once_for_micro_batches))
    accumulation.leave_to_tfdist()


def _update_stock(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    update_over_replicas(optimizer, gradients, ReductionContext(), may_compile=False)


def _reduce_and_apply(
    optimizer: OptimizerUpdate,
    gradients: Sequence[Any],
    context: ReductionContext,
    *,
    contributes: tf.Tensor | None,
    micro_steps: int,
    compiles: bool | None = False,
) -> None:
    """Sums `gradients`, the sums of `micro_steps` micro-steps, over the replicas and updates the variables."""
    sharded = sharded_update(optimizer)
    # Before the exchange: the state of a compressor must not depend on a loss scale, which changes, nor on the number
    # of micro-steps of an update.
    summed = _reduce(optimizer, sharded, gradients, context, contributes, _divisor(optimizer, micro_steps))
    timing = current_timing() if sharded is None else None
    with nullcontext() if timing is None else timing.updating(summed):
        _apply(optimizer, sharded, summed, micro_steps=micro_steps, compiles=compiles)


def _reduce(
    optimizer: OptimizerUpdate,
    sharded: ShardedUpdate | None,
    gradients: Sequence[Any],
    context: ReductionContext,
    contributes: tf.Tensor | None,
    divisor: Any,
) -> Any:
    """Divides gradients and returns their sums over the replicas; if sharded, the own parts."""
    if contributes is not None and tf.executing_eagerly():
        # Eager replicas reduce in a merge call, where a replica's own condition is not known.
        gradients = [zeros_unless(contributes, gradient) for gradient in gradients]
        contributes = None
    if divisor is not None:
        gradients = [divided(gradient, divisor) for gradient in gradients]
    gradients = [with_shape(gradient, shape) for gradient, shape in zip(gradients, optimizer.shapes, strict=True)]
    with context.of_gradients(contributes, optimizer.paths), shared_operations():
        return sum_over_replicas(gradients) if sharded is None else sharded.scatter(gradients, context)


def _divisor(optimizer: OptimizerUpdate, micro_steps: int) -> Any:
    """What gradients of the scaled loss of `micro_steps` are divided by; `None` stands for 1."""
    if optimizer.loss_scale is not None:
        return optimizer.loss_scale.value * micro_steps
    return None if micro_steps == 1 else float(micro_steps)


def _divided_parts(parts: dict[int, tf.Tensor], divisor: Any) -> dict[int, tf.Tensor]:
    return parts if divisor is None else {position: divided(part, divisor) for position, part in parts.items()}


def _apply(
    optimizer: OptimizerUpdate,
    sharded: ShardedUpdate | None,
    summed: Any,
    *,
    micro_steps: int,
    compiles: bool | None = False,
) -> None:
    """Updates the variables by the result of `_reduce`, unless a loss scale is lowered."""
    apply = functools.partial(_apply_reduced, optimizer, sharded, summed, micro_steps, compiles)
    local = _local_update(optimizer)
    apply() if local is None else local.update(apply)


def _apply_reduced(
    optimizer: OptimizerUpdate, sharded: ShardedUpdate | None, summed: Any, micro_steps: int, compiles: bool | None
) -> None:
    clip_and_apply: Callable[[Any, bool | None], None] = (sharded or optimizer).clip_and_apply
    loss_scale = optimizer.loss_scale
    if loss_scale is None:
        clip_and_apply(summed, compiles)
        return
    finite = all_finite(summed) if sharded is None else sharded.all_finite(summed)
    cond_over_replicas(
        finite,
        lambda: clip_and_apply(summed, compiles),
        # Keras counts the micro-step after the update; the micro-steps of a skipped update must not count.
        lambda: optimizer.take_back(micro_steps),
    )
    loss_scale.update(finite)


def _reset(optimizer: OptimizerUpdate) -> None:
    """Sets the accumulators to zero."""
    for accumulator in optimizer.accumulators:
        optimizer.strategy.extended.update(
            accumulator, lambda variable: variable.assign(tf.zeros_like(variable)), group=False
        )


def _contributes() -> Any:
    """Returns whether this replica has samples, a bool scalar, or `None` if it certainly has."""
    step = current_step()
    if step is None or step.contributes is True:
        return None
    return tf.convert_to_tensor(step.contributes)


def add(accumulator: tf.Variable, gradient: Any) -> None:
    """Adds a gradient, dense or `tf.IndexedSlices`, to an accumulator."""
    if isinstance(gradient, tf.IndexedSlices):
        accumulator.scatter_add(gradient)
    else:
        accumulator.assign_add(tf.cast(gradient, accumulator.dtype))


def added(accumulator: tf.Variable, gradient: Any) -> tf.Tensor:
    """Returns the sum of an accumulator and a gradient, and leaves the accumulator unchanged."""
    total = tf.convert_to_tensor(accumulator)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], gradient.values)
    return total + tf.cast(gradient, total.dtype)
