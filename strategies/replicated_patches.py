"""Patches Keras where it has no hook for strategies. Strategies of TensorFlow are not affected."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.auto_jit_compile import patch_auto_jit_compile
from tfdist.keras_internals.compiled_calls import patch_compiled_calls
from tfdist.keras_internals.epoch_iterator import patch_errors_of_steps, patch_number_of_batches
from tfdist.keras_internals.keras_callbacks import wrap_callback_list
from tfdist.keras_internals.losses import patch_losses
from tfdist.keras_internals.model_introspection import patch_concatenation, patch_predict_on_batch
from tfdist.keras_internals.optimizers import OptimizerUpdate, build_outside_trace, patch_optimizers_of_strategies
from tfdist.keras_internals.progress_bar import patch_progress_bar
from tfdist.keras_internals.seed_generators import patch_seed_generators
from tfdist.keras_internals.sharded_optimizers import patch_sharded_optimizers
from tfdist.keras_internals.statements_in_scope import patch_statements_in_scope
from tfdist.keras_internals.symbolic_build import patch_symbolic_build
from tfdist.keras_internals.synchronized_moments import patch_synchronized_moments
from tfdist.strategies.exchange_start import raise_failed_exchange
from tfdist.tensorflow_internals.counted_batches import patch_distributed_iterators
from tfdist.tensorflow_internals.merge_calls import patch_merge_calls
from tfdist.tensorflow_internals.python_function_results import copy_results_of_python_functions
from tfdist.tensorflow_internals.runtime import patch_graph_reset
from tfdist.training.batch_comparison import DifferentBatchesError
from tfdist.training.failed_steps import recover_from
from tfdist.training.micro_batches import current_micro_batch
from tfdist.training.optimizer_update import apply_once_for_micro_batches, update_over_replicas
from tfdist.training.sample_shares import compiles_calls, current_step, has_samples, keep_added_losses

_is_patched = False


def patch_keras_once(strategy_class: Any) -> None:
    """Patches Keras for models under strategies of `strategy_class`, the base of the mirrored strategies."""
    global _is_patched
    if _is_patched:
        return

    def is_ours(strategy: Any) -> bool:
        return isinstance(strategy, strategy_class)

    def keeps_order(strategy: Any) -> bool:
        return is_ours(strategy) and keeps_order_of_rows(strategy)

    @contextmanager
    def build_locally(strategy: Any) -> Iterator[None]:
        if is_ours(strategy):
            with strategy._building_locally():
                yield
        else:
            yield

    def agree_on_batches(strategy: Any, own_batches: int | None) -> int | None:
        return strategy._max_batches(own_batches) if is_ours(strategy) else own_batches

    def carry_counts(strategy: Any, dataset: Any, own_batches: int | None) -> Any:
        return strategy._carry_counts(dataset, own_batches) if is_ours(strategy) else dataset

    def before_step(strategy: Any) -> None:
        if is_ours(strategy):
            strategy.check_batches()

    def after_error(strategy: Any, error: BaseException) -> None:
        if is_ours(strategy):
            strategy.divided_rows.explain(error)
            recover_from(error, strategy._models, strategy)
            # Another worker may have left because of it, so that this one fails in an exchange.
            if not isinstance(error, DifferentBatchesError):
                strategy.check_batches()
            raise_failed_exchange(error)

    def at_end(is_training: bool, call: Callable[..., None], callback_list: Any, *args: Any, **kwargs: Any) -> None:
        strategy: Any = getattr(getattr(callback_list, "model", None), "distribute_strategy", None)
        if is_ours(strategy) and strategy._batch_comparison is not None:
            strategy._batch_comparison.end(only_new=not is_training)
        call(*args, **kwargs)

    patch_graph_reset(is_ours)
    patch_statements_in_scope(is_ours)
    patch_losses(current_step)
    patch_auto_jit_compile(is_ours)
    patch_compiled_calls(is_ours, compiles_calls)
    patch_optimizers_of_strategies(is_ours, _update, apply_once_for_micro_batches, _build)
    patch_sharded_optimizers(lambda strategy: strategy.state_sharding if is_ours(strategy) else None)
    patch_seed_generators(is_ours, _replica_index)
    patch_predict_on_batch(is_ours, strategy_class._shard_rows)
    patch_concatenation(keeps_order)
    patch_number_of_batches(agree_on_batches, carry_counts)
    patch_errors_of_steps(after_error, before_step)
    wrap_callback_list("on_train_end", functools.partial(at_end, True))
    for method in ("on_test_end", "on_predict_end"):
        wrap_callback_list(method, functools.partial(at_end, False))
    copy_results_of_python_functions()
    patch_distributed_iterators()
    patch_merge_calls(keep_added_losses)
    patch_symbolic_build(is_ours, build_locally)
    patch_synchronized_moments(has_samples)
    patch_progress_bar(is_ours, _sent_bytes)
    _is_patched = True


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
        held = [one.value if isinstance(one, keras.Variable) else one for one in variables]
        have_values = all(bool(one.is_initialized()) for one in held)
    if have_values:
        build_outside_trace(optimizer, variables)


def _replica_index() -> Any:
    """Returns the number of this replica, or of its micro-batch, over all workers."""
    micro_batch = current_micro_batch()
    return tf.distribute.get_replica_context().replica_id_in_sync_group if micro_batch is None else micro_batch.part
