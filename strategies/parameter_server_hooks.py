"""What a strategy of parameter servers does where Keras has no hook for strategies."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.optimizers import OptimizerUpdate, build_outside_trace
from tfdist.parameter_server.chief import ChiefTraining
from tfdist.parameter_server.client_training import LocalSteps
from tfdist.parameter_server.federated_chief import FederatedChief
from tfdist.parameter_server.gradient_push import update_directly
from tfdist.parameter_server.modes import FederatedAveraging
from tfdist.parameter_server.worker_scope import WorkerScope, current_loss_step, look_up, num_parts
from tfdist.strategy_hooks import StrategyHooks, UpdateHooks


def _update(optimizer: OptimizerUpdate, gradients: list[Any]) -> None:
    scope, steps = WorkerScope.current(), LocalSteps.current()
    if steps is not None:
        optimizer.apply(optimizer.clip(steps.gradients(optimizer, gradients)))
    elif scope is None:  # a custom training loop, which schedules its functions itself
        update_directly(optimizer, gradients)
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


def _look_up(parts: Sequence[Any], ids: tf.Tensor) -> tf.Tensor | None:
    is_local = LocalSteps.current() is not None  # a client has a copy of the table
    return None if is_local else look_up(parts, ids)


HOOKS = StrategyHooks(
    current_step=current_loss_step,
    compiles_calls=WorkerScope.compiles_calls,
    scope_of_step=WorkerScope.current,
    optimizers=UpdateHooks(_update, _apply, _build),
    on_error=lambda strategy, error: strategy.divided_rows.explain(error),
    sent_bytes=_pushed_bytes,
    training=_chief_training,
    look_up=_look_up,
    num_shards=lambda strategy, shape: num_parts(strategy.variable_partitioner, shape),
)
