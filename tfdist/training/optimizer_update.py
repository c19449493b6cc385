"""One optimizer update over all replicas, with what a step knows: micro-batches, samples, times, local updates."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReductionContext
from tfdist.compression.gradient_tensors import zeros_unless
from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.optimizers import OptimizerUpdate, update_by, update_hooks
from tfdist.sharded_state.sharded_update import held_update
from tfdist.strategy_hooks import UpdateHooks
from tfdist.training.micro_batches import current_micro_batch, sum_pairwise
from tfdist.training.sample_shares import compiles_updates, current_step, current_timing
from tfdist.training.strategy_protocol import is_tfdist_strategy, training_strategy
from tfdist.updates.update_engine import WholeUpdate, apply_accumulated, run_micro_step


def apply_once_for_micro_batches(
    apply: Callable[[list[Any]], None], gradients: list[Any], are_values: Sequence[bool]
) -> None:
    """Calls `apply` with `gradients`, or once for all micro-batches of this replica with the sums of theirs.

    Where `are_values`, a gradient is instead a new value of its variable (a float8 scale), of which the largest is
    used.
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
    own_gradients = [
        gradient if gradient is None or value else zeros_unless(contributes, gradient)
        for gradient, value in zip(gradients, is_value, strict=True)
    ]
    micro_batch.synchronize("an update", own_gradients, combine, apply)


def update_over_replicas(
    optimizer: OptimizerUpdate, gradients: Sequence[Any], context: ReductionContext, *, may_compile: bool = True
) -> None:
    """Runs one micro-step, and the update if it is the last micro-step of an update.

    `k` micro-steps on `n` replicas compute the update of one step of one process on the `k * n` concatenated batches:
    gradients are summed on the replica, reduced once, then checked, unscaled, clipped and applied. If a gradient
    overflows on one replica, all replicas see it in the sum, and all of them skip the update and lower the loss scale.
    No replica waits for another in a branch.
    """
    if (timing := current_timing()) is not None:
        timing.gradients_ready(gradients)
    local = _local_update(optimizer)
    if local is not None:
        gradients = local.take(gradients)
    held = held_update(optimizer, context, compiles_updates() if may_compile else False)
    run_micro_step(held, gradients, _contributes(), functools.partial(_apply, held))


def _apply(held: WholeUpdate, apply: Callable[[], None], sums: Sequence[Any]) -> None:
    """Calls `apply`, which updates the variables by `sums`, unless the worker updates by itself and has no samples."""
    timing, local = current_timing() if held.is_whole else None, _local_update(held.update)
    guard, step = training_strategy(held.update.strategy).step_guard, current_step()
    if guard is not None and step is not None and step.model is guard.model:
        may_overflow = held.update.loss_scale is not None
        guard.values.store_gradients(held.update.optimizer, sums, may_overflow=may_overflow)
    with nullcontext() if timing is None else timing.updating(sums):
        apply() if local is None else local.update(apply)


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
        held = held_update(update, context, False)
        apply_accumulated(held, micro_steps, functools.partial(_apply, held))
        for variable in update.constrained_variables:
            variable.assign(variable.constraint(variable))

    flush_replicas = tf.function(lambda: strategy.run(flush_replica), autograph=False)

    def update() -> None:
        flush_replicas()
        accumulation.complete()

    training_strategy(strategy).run_update(accumulation.model, update)
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
    for optimizer in accumulation.optimizers:
        update_by(optimizer, UpdateHooks(_update_stock, apply_once_for_micro_batches))
    accumulation.leave_to_tfdist()


def _update_stock(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    update_over_replicas(optimizer, gradients, ReductionContext(), may_compile=False)


def _contributes() -> Any:
    """Returns whether this replica has samples, a bool scalar, or `None` if it certainly has."""
    step = current_step()
    if step is None or step.contributes is True:
        return None
    return tf.convert_to_tensor(step.contributes)
