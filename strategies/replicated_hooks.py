"""What strategies of replicas do where Keras has no hook for strategies."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.optimizers import OptimizerUpdate, build_outside_trace
from tfdist.strategies.exchange_start import raise_failed_exchange
from tfdist.strategies.local_update_hooks import begin_epoch, end_epoch, ends_are_known, mean_of_workers
from tfdist.strategy_hooks import StrategyHooks, UpdateHooks
from tfdist.training.batch_comparison import DifferentBatchesError
from tfdist.training.failed_steps import recover_from
from tfdist.training.micro_batches import current_micro_batch
from tfdist.training.optimizer_update import apply_once_for_micro_batches, update_over_replicas
from tfdist.training.sample_shares import compiles_calls, current_step, has_samples, keep_added_losses


def keeps_order_of_rows(strategy: Any) -> bool:
    """Whether the replicas' rows follow each other in a batch, and are not dealt out to the workers in turn."""
    return len(set(strategy.replicas_of_workers)) > 1 or strategy.row_shares is not None


def _sent_bytes(strategy: Any) -> int | None:
    return strategy.communication.wire_bytes if strategy.num_replicas_in_sync > 1 else None


def _update(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    update_over_replicas(optimizer, gradients, optimizer.strategy._reduction_context)


def _build(optimizer: Any, variables: list[Any]) -> None:
    """Builds an optimizer of a custom step, unless the step itself creates a variable that it updates.

    A function that creates variables is traced twice, and both graphs stay in the function that calls it.
    """
    if tf.executing_eagerly():
        return
    with tf.init_scope():
        held = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
        have_values = all(bool(variable.is_initialized()) for variable in held)
    if have_values:
        build_outside_trace(optimizer, variables)


def _replica_index() -> Any:
    """Returns the number of this replica, or of its micro-batch, over all workers."""
    micro_batch = current_micro_batch()
    return tf.distribute.get_replica_context().replica_id_in_sync_group if micro_batch is None else micro_batch.part


def _on_error(strategy: Any, error: BaseException) -> None:
    strategy.divided_rows.explain(error)
    recover_from(error, strategy._models, strategy)
    # Another worker may have left because of it, so that this one fails in an exchange.
    if not isinstance(error, DifferentBatchesError):
        strategy.check_batches()
    raise_failed_exchange(error)


def _at_end(strategy: Any, is_training: bool) -> None:
    if strategy._batch_comparison is not None:
        strategy._batch_comparison.end(only_new=not is_training)


HOOKS = StrategyHooks(
    current_step=current_step,
    compiles_calls=compiles_calls,
    has_samples=has_samples,
    keep_state=keep_added_losses,
    part=_replica_index,
    optimizers=UpdateHooks(_update, apply_once_for_micro_batches, _build),
    sharding=lambda strategy: strategy.state_sharding,
    has_copies=True,
    split_rows=lambda strategy, x: strategy._shard_rows(x),
    keeps_order=keeps_order_of_rows,
    agree_on_batches=lambda strategy, batches: strategy._max_batches(batches),
    carry_counts=lambda strategy, dataset, batches: strategy._carry_counts(dataset, batches),
    begin_epoch=begin_epoch,
    end_epoch=end_epoch,
    mean_of_workers=mean_of_workers,
    ends_are_known=ends_are_known,
    before_step=lambda strategy: strategy.check_batches(),
    on_error=_on_error,
    at_end=_at_end,
    local_values=lambda strategy: strategy._building_locally(),
    sent_bytes=_sent_bytes,
    step_function=lambda strategy, model, name, function: strategy.step_function(model, name, function),
)
