"""Patches Keras for models whose variables parameter servers hold. Strategies of TensorFlow are not affected."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.auto_jit_compile import patch_auto_jit_compile
from tfdist.keras_internals.compiled_calls import patch_compiled_calls
from tfdist.keras_internals.created_parts import patch_variable_creation
from tfdist.keras_internals.embeddings import patch_embedding_layers
from tfdist.keras_internals.epoch_iterator import patch_errors_of_steps
from tfdist.keras_internals.losses import patch_losses
from tfdist.keras_internals.optimizers import OptimizerUpdate, build_outside_trace, patch_optimizers_of_strategies
from tfdist.keras_internals.progress_bar import patch_progress_bar
from tfdist.keras_internals.scheduled_training import patch_optimizer_update_step, patch_trainer
from tfdist.keras_internals.symbolic_build import patch_symbolic_build
from tfdist.parameter_server.chief import ChiefTraining
from tfdist.parameter_server.client_training import LocalSteps
from tfdist.parameter_server.embedding_lookup import look_up, num_parts
from tfdist.parameter_server.federated_averaging import FederatedAveraging
from tfdist.parameter_server.federated_chief import FederatedChief
from tfdist.parameter_server.worker_scope import WorkerScope, current_loss_step
from tfdist.tensorflow_internals.python_function_results import copy_results_of_python_functions
from tfdist.tensorflow_internals.runtime import patch_graph_reset

_is_patched = False


def patch_keras_once(strategy_class: Any) -> None:
    """Patches Keras for models under strategies of `strategy_class`, the parameter server strategy."""
    global _is_patched
    if _is_patched:
        return

    def is_ours(strategy: Any) -> bool:
        return isinstance(strategy, strategy_class)

    def look_up_rows(parts: Sequence[Any], ids: tf.Tensor) -> tf.Tensor | None:
        is_local = LocalSteps.current() is not None  # a client has a copy of the table
        return look_up(parts, ids) if is_ours(tf.distribute.get_strategy()) and not is_local else None

    def num_shards(shape: tuple[int, int]) -> int:
        strategy = tf.distribute.get_strategy()
        return num_parts(strategy.variable_partitioner, shape) if is_ours(strategy) else 1

    def explain(strategy: Any, error: BaseException) -> None:
        if is_ours(strategy):
            strategy.divided_rows.explain(error)

    patch_errors_of_steps(explain)
    copy_results_of_python_functions()
    patch_optimizers_of_strategies(is_ours, _update, _apply, _build)
    patch_auto_jit_compile(is_ours)
    patch_graph_reset(is_ours)
    patch_losses(current_loss_step)
    patch_compiled_calls(is_ours, WorkerScope.compiles_calls, WorkerScope.current)
    patch_optimizer_update_step()
    patch_trainer(is_ours, _chief_training)
    patch_variable_creation()
    patch_embedding_layers(look_up_rows, num_shards)
    patch_progress_bar(is_ours, _pushed_bytes)
    patch_symbolic_build(is_ours, lambda _: contextlib.nullcontext())
    _is_patched = True


def _update(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    scope, steps = WorkerScope.current(), LocalSteps.current()
    if steps is not None:
        optimizer.apply(optimizer.clip(steps.gradients(optimizer, gradients)))
    elif scope is None:  # a custom training loop, which schedules its functions itself
        optimizer.apply(optimizer.clip(gradients))
    else:
        scope.push(optimizer, gradients)


def _apply(apply: Callable[[list[Any]], None], gradients: list[Any], _: list[bool]) -> None:
    scope = WorkerScope.current()
    with contextlib.nullcontext() if scope is None else scope.in_update():
        apply(gradients)


def _build(optimizer: Any, variables: list[Any]) -> None:
    if WorkerScope.current() is not None:
        build_outside_trace(optimizer, variables)


def _chief_training(model: Any) -> ChiefTraining:
    strategy = model.distribute_strategy
    kind = FederatedChief if isinstance(strategy.mode, FederatedAveraging) else ChiefTraining
    return kind(model, strategy._stats)


def _pushed_bytes(strategy: Any) -> int:
    return sum(stats.bytes_pushed for stats in strategy.worker_stats)
