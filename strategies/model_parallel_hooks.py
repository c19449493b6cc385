"""What a strategy of models in stages does where Keras has no hook for strategies."""

import functools
import warnings
from typing import Any

import tensorflow as tf

from tfdist.pipeline.micro_batch_loss import MicroBatchLoss, current_stage_loss
from tfdist.strategy_hooks import StrategyHooks, hooks_of


def _explain(strategy: Any, error: BaseException) -> None:
    if not isinstance(error, tf.errors.OpError):
        return
    if strategy.servers:
        strategy.servers.explain(error)
    if isinstance(error, tf.errors.CancelledError):
        raise _failed_stage(error) from error


def _is_recomputed() -> bool | None:
    loss = current_stage_loss()
    if isinstance(loss, MicroBatchLoss):
        if not loss.recomputes:
            _warn_not_recomputed()
        return loss.recomputes
    return False if loss is not None or hooks_of(tf.distribute.get_strategy()) is HOOKS else None


@functools.cache
def _warn_not_recomputed() -> None:
    warnings.warn(
        "Rematerialized layers keep their intermediate results in stages with a layout map. Received: layers under "
        "`keras.RematScope`, or functions of `keras.remat`, with `layout_map`. Expected: stages without a layout map, "
        "which compute them again in the backward pass. The numbers are equal; use more stages or micro-batches if the "
        "memory does not suffice.",
        stacklevel=2,
    )


def _failed_stage(error: tf.errors.CancelledError) -> tf.errors.CancelledError:
    """Returns the error of a step in which another operation failed than TensorFlow reports."""
    return tf.errors.CancelledError(
        None,
        None,
        "An operation of a stage has failed, and TensorFlow reports only another one that waited for it. Received: "
        f"{str(error.message).strip().splitlines()[-1]!r}. Expected: a batch that all layers can compute; an id beyond "
        'the rows of an embedding is a frequent cause. The log names the operation, in the first line with "aborting '
        'with status", unless TF_CPP_MIN_LOG_LEVEL is above 1. So does `model.predict` on this batch without the '
        "strategy.",
    )


HOOKS = StrategyHooks(
    current_step=current_stage_loss,
    is_recomputed=_is_recomputed,
    is_elsewhere=True,
    on_error=_explain,
    create=lambda strategy, new: strategy._create_in_parts(new) if strategy._create_in_parts else None,
)
