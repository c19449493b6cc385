"""What strategies of replicas do where Keras has no hook for strategies."""

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.batch_calls import BatchCalls
from tfdist.keras_internals.model_introspection import trace_step
from tfdist.keras_internals.model_state import SEED, WEIGHT, OptimizerState, components, model_variables, optimizers_of
from tfdist.keras_internals.optimizers import OptimizerUpdate, build_outside_trace
from tfdist.keras_internals.placed_variables import held_variable
from tfdist.strategies.exchange_start import raise_failed_exchange
from tfdist.strategy_hooks import StrategyHooks, UpdateHooks
from tfdist.tensorflow_internals.aborted_collectives import record_failed_step
from tfdist.training.batch_comparison import DifferentBatchesError
from tfdist.training.micro_batches import current_micro_batch
from tfdist.training.optimizer_update import apply_once_for_micro_batches, update_over_replicas
from tfdist.training.sample_shares import compiles_calls, current_step, has_samples, keep_added_losses
from tfdist.utils.temporary_values import setting_attributes

_log = logging.getLogger("tfdist")


def keeps_order_of_rows(strategy: Any) -> bool:
    """Whether the replicas' rows follow each other in a batch, and are not dealt out to the workers in turn."""
    return len(set(strategy.replicas_of_workers)) > 1 or strategy.row_shares is not None


def _update(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    update_over_replicas(optimizer, gradients, optimizer.strategy._reduction_context)


def _build(optimizer: Any, variables: list[Any]) -> None:
    """Builds an optimizer of a custom step, unless the step itself creates a variable that it updates.

    A function that creates variables is traced twice, and both graphs stay in the function that calls it.
    """
    if tf.executing_eagerly():
        return
    with tf.init_scope():
        held = [held_variable(one) if isinstance(one, keras.Variable) else one for one in variables]
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


def _begin_epoch(strategy: Any, training: bool, knows_end: bool) -> None:
    """Lets workers that train by themselves draw batches without asking each other, where that is possible."""
    if strategy.local_updates is None:
        return
    strategy.local_updates.begin_epoch(knows_end=training and knows_end)
    if not training:
        strategy.local_updates.synchronize()
    elif not knows_end and strategy.num_workers > 1 and strategy.rank == 0:
        _warn_of_unknown_end()


def _end_epoch(strategy: Any, has_trained: bool) -> None:
    """Makes all weights equal after training."""
    if strategy.local_updates is not None:
        strategy.local_updates.end_epoch()
        if has_trained:
            strategy.local_updates.synchronize()


def _mean_of_workers(strategy: Any, numbers: list[Any]) -> list[float] | None:
    """Averages this worker's logs with those of the others, which have computed others."""
    if strategy.local_updates is None:
        return None
    return strategy.local_updates.mean_of_workers([float(number) for number in numbers])


def _ends_are_known(strategy: Any) -> Any:
    """Returns a bool variable, which is true in an epoch whose number of steps all workers know."""
    return None if strategy.local_updates is None else strategy.local_updates.ends_are_known


@functools.cache  # warns once
def _warn_of_unknown_end() -> None:
    _log.warning(
        "The workers ask each other in each step whether the data has ended, because its number of steps is not known. "
        "Received: a dataset of unknown length, or `steps_per_epoch` with data that ends, or a number of steps that is "
        "no multiple of `steps_per_execution`. Expected, for local updates that exchange nothing: `dataset.repeat()` "
        "with `steps_per_epoch`, or `dataset.apply(tf.data.experimental.assert_cardinality(batches))`."
    )


def _reset_metrics(strategy: Any, model: Any) -> None:
    if strategy.metric_totals is not None:
        strategy.metric_totals.clear(model.metrics_variables)


def _step_function(strategy: Any, model: Any, name: str, function: Any) -> Any:
    elastic, guard, last_batch = strategy._elastic, strategy.step_guard, strategy.last_batch
    guard = guard if guard is not None and name == "train" and guard.model is model else None
    last_batch = last_batch if last_batch is not None and name == "train" and last_batch.model is model else None
    if elastic is None and guard is None and last_batch is None:
        return function
    if name == "predict":
        return elastic.step_function(model, name, function)

    calls = BatchCalls(function)
    run = calls if last_batch is None else last_batch.kept_by(calls)
    run = run if guard is None else guard.before_attempts(run)
    if elastic is not None:
        run = elastic.step_function(model, name, run, functools.partial(trace_step, function))
    return _one_step_at_a_time(model, run if guard is None else guard.after_step(run))


def _one_step_at_a_time(model: Any, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the function of Keras that draws the batches of an execution and runs a step on each."""

    def run_steps(iterator: Any) -> Any:
        logs: Any = None
        for number in range(model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise StopIteration from None
                break
            logs = run(batch)
        return logs

    return run_steps


HOOKS = StrategyHooks(
    current_step=current_step,
    compiles_calls=compiles_calls,
    has_samples=has_samples,
    keep_state=keep_added_losses,
    part=_replica_index,
    optimizers=UpdateHooks(_update, apply_once_for_micro_batches, _build),
    sharding=lambda strategy: strategy.state_sharding,
    has_copies=True,
    are_weights_apart=lambda strategy: strategy.shards_weights,
    create=lambda strategy, new: None if strategy.weight_gathers is None else strategy.weight_gathers.create(new),
    split_rows=lambda strategy, x: strategy._shard_rows(x),
    keeps_order=keeps_order_of_rows,
    agree_on_batches=lambda strategy, batches: strategy._max_batches(batches),
    carry_counts=lambda strategy, dataset, batches: strategy._carry_counts(dataset, batches),
    begin_epoch=_begin_epoch,
    end_epoch=_end_epoch,
    mean_of_workers=_mean_of_workers,
    ends_are_known=_ends_are_known,
    before_step=lambda strategy: strategy.check_batches(),
    on_error=_on_error,
    at_end=_at_end,
    local_values=lambda strategy: setting_attributes(strategy, _builds_locally=True),
    sent_bytes=lambda strategy: strategy.communication.wire_bytes if strategy.num_replicas_in_sync > 1 else None,
    read_metrics=lambda strategy, read: read() if strategy._elastic is None else strategy._elastic.run_alone(read),
    reset_metrics=_reset_metrics,
    fit_callbacks=lambda strategy: [] if strategy._elastic is None else strategy._elastic.fit_callbacks(),
    step_function=_step_function,
)


def recover_from(error: BaseException, models: Iterable[Any], strategy: Any) -> None:
    """Prepares the next `fit`, `evaluate` or `predict` after an exception has ended one.

    A step that fails on one replica cancels the others wherever they are. Some have then counted the step, or drawn its
    random numbers, and others have not.
    """
    if strategy.num_workers == 1:
        for model in models:
            for variable in _equal_variables(model):
                first, *other_copies = components(strategy, variable)
                for copy in other_copies:
                    copy.assign(first)
    elif isinstance(error, tf.errors.OpError) and not _is_of_callback(error):
        record_failed_step(error)


def _is_of_callback(error: BaseException) -> bool:
    """Whether a callback raised the error, such as that of a missing file, so that no step was interrupted."""
    callbacks = inspect.getfile(keras.callbacks.CallbackList)
    return any(frame.f_code.co_filename == callbacks for frame, _ in traceback.walk_tb(error.__traceback__))


def _equal_variables(model: Any) -> Iterator[Any]:
    """Yields the variables that are equal on all replicas between two steps."""
    yield from (
        model_variable.variable for model_variable in model_variables(model) if model_variable.kind in (WEIGHT, SEED)
    )
    for optimizer in optimizers_of(model):
        yield from OptimizerState(optimizer).variables
