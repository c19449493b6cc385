"""The parts of a Keras optimizer's update with its loss scale, and the patch that lets tfdist order them."""

import concurrent.futures
import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TFOptimizer
from tfdist.keras_internals.keras_updates import (
    is_equal_on_replicas,
    is_of_each_variable,
    is_of_keras,
    is_time_of_averages,
    settings,
)
from tfdist.keras_internals.statements_in_scope import apply_on_replicas, is_outside_of_replicas
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import UpdateHooks, has_hooks, hooks_of
from tfdist.tensorflow_internals.function_graphs import is_symbolic
from tfdist.tensorflow_internals.merge_calls import cond_over_replicas
from tfdist.tensorflow_internals.shared_operations import call_shared, shared_operations
from tfdist.tensorflow_internals.xla_functions import call_compiled, compiles_on_cpus
from tfdist.utils.temporary_values import setting
from tfdist.utils.weak_identity_map import WeakIdentityMap

_paths: "weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]]" = weakref.WeakKeyDictionary()
_loss_scale: contextvars.ContextVar["LossScale | None"] = contextvars.ContextVar("tfdist_loss_scale", default=None)
# Updates of smaller variables stay in a core's cache, and compiling each takes 30 to 50 ms.
LARGE_UPDATE = 200_000
_reduced: contextvars.ContextVar[bool] = contextvars.ContextVar("tfdist_gradients_are_reduced", default=False)
_of_stock_strategies: WeakIdentityMap[UpdateHooks] = WeakIdentityMap()


def unique_path(strategy: Any, variable: Any) -> str:
    """Returns the variable's path, with a number if another variable of the strategy has or had the same path."""
    paths = _paths.setdefault(strategy, {})
    base_path = str(getattr(variable, "path", None) or variable.name.partition(":")[0])  # a tf.Variable has a name only
    for number in itertools.count():
        path = f"{base_path}_{number}" if number else base_path
        if path not in paths:
            paths[path] = weakref.ref(variable)
        # The path of a deleted variable is not used again, as compressors may hold state under it.
        if paths[path]() is variable:
            return path
    raise AssertionError("unreachable")


def variables_by_path(strategy: Any, optimizer: Any) -> dict[str, Any]:
    """Returns the variables that an optimizer updates, by `unique_path`; an empty dict if it is not built."""
    return {unique_path(strategy, variable): variable for variable in getattr(optimizer, "_trainable_variables", ())}


def current_loss_scale() -> "LossScale | None":
    """Returns the loss scale of the update that is running, if its optimizer has one."""
    return _loss_scale.get()


class LossScale:
    """The dynamic loss scale of a `keras.optimizers.LossScaleOptimizer`."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def value(self) -> tf.Tensor:
        """The scale, a float32 scalar."""
        return tf.convert_to_tensor(self._optimizer.dynamic_scale)

    @property
    def variables(self) -> list[Any]:
        """The scale, and the number of finite updates in a row."""
        return [self._optimizer.dynamic_scale, self._optimizer.step_counter]

    def update(self, finite: tf.Tensor) -> None:
        """Doubles the scale after `dynamic_growth_steps` finite updates in a row and halves it after another."""
        optimizer = self._optimizer
        counter = tf.convert_to_tensor(optimizer.step_counter)
        grown = tf.equal(counter, optimizer.dynamic_growth_steps - 1)
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        restarts = tf.logical_or(grown, tf.logical_not(finite))
        optimizer.dynamic_scale.assign(self.value * factor)
        optimizer.step_counter.assign(tf.where(restarts, tf.zeros_like(counter), counter + 1))


def apply_scaled(optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    """Is `LossScaleOptimizer.apply` where tfdist updates the variables.

    The inner optimizer updates with `current_loss_scale()`, because an overflow on one replica is an overflow on all.
    """
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(trainable_variables)
        optimizer.built = True
    with setting(_loss_scale, LossScale(optimizer)):
        optimizer.inner_optimizer.apply(grads, trainable_variables=trainable_variables)


def reduced_gradients() -> contextlib.AbstractContextManager[None]:
    """Within this context Keras does not sum gradients over the replicas."""
    return setting(_reduced, True)


class OptimizerUpdate:
    """The parts of one optimizer's update. Call each of them in a replica context."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], loss_scale: LossScale | None = None) -> None:
        self.optimizer = optimizer
        self.variables = list(variables)
        self.loss_scale = loss_scale

    @property
    def strategy(self) -> Any:
        """The strategy in whose scope the optimizer was created."""
        return self.optimizer._distribution_strategy

    @property
    def paths(self) -> list[str]:
        """The paths of the variables, with a number if another variable of the strategy has or had the same path."""
        return [unique_path(self.strategy, variable) for variable in self.variables]

    @property
    def shapes(self) -> list[tf.TensorShape]:
        return [tf.TensorShape(getattr(variable, "gradient_shape", variable.shape)) for variable in self.variables]

    @property
    def servers_variables(self) -> list[tf.Variable]:
        """The `tf.Variable`s behind the variables."""
        return [getattr(variable, "_value", variable) for variable in self.variables]

    @property
    def constrained_variables(self) -> list[Any]:
        return [variable for variable in self.variables if getattr(variable, "constraint", None) is not None]

    def constrain(self) -> None:
        """Applies the variables' constraints, as Keras does after an update."""
        for variable in self.constrained_variables:
            with tf.device(variable._value.device):
                variable._value.assign(variable.constraint(variable._value.read_value()))

    @property
    def changed_variables(self) -> list[tf.Variable]:
        """The `tf.Variable`s that a step may read and that this update changes."""
        scale = [] if self.loss_scale is None else self.loss_scale.variables
        return [*self.servers_variables, *(variable._value for variable in (self.optimizer._iterations, *scale))]

    @property
    def counter(self) -> tf.Variable:
        """The count of updates."""
        return self.optimizer._iterations._value

    def count(self, updated: tf.Tensor) -> None:
        """Adds `updated`, a bool scalar, to the optimizer's count of updates."""
        self.counter.assign_add(tf.cast(updated, self.counter.dtype))

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-steps of an update."""
        return int(self.optimizer.gradient_accumulation_steps or 1)

    @property
    def accumulators(self) -> list[tf.Variable]:
        """The variables with the sums of this replica's gradients, one per trainable variable."""
        optimizer = self.optimizer
        indices = [optimizer._get_variable_index(variable) for variable in self.variables]
        return [optimizer._accumulated_gradients[index].value for index in indices]

    @property
    def micro_steps(self) -> tf.Tensor:
        """Number of micro-steps before the present one."""
        return tf.convert_to_tensor(self.optimizer._iterations)

    def take_back(self, micro_steps: int) -> None:
        """Subtracts `micro_steps` from the count, for a skipped update."""
        self.strategy.extended.update(
            self.optimizer._iterations.value,
            lambda count: count.assign_sub(tf.cast(micro_steps, count.dtype)),
            group=False,
        )

    def clip(self, gradients: Sequence[Any]) -> list[Any]:
        """Clips by the optimizer's `clipnorm`, `global_clipnorm` or `clipvalue`."""
        if self.optimizer.clipvalue:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return list(self.optimizer._clip_gradients(list(gradients)))

    def clip_and_apply(self, gradients: Sequence[Any], compiles: bool | None) -> None:
        """Clips, and updates the variables.

        XLA `compiles` clipping and updates, if no gradient is sparse. `None`: the updates of large variables alone, on
        CPUs. TensorFlow computes them in about thirty passes over memory, XLA in seven.
        """
        if compiles and not self.optimizer.use_ema and all(map(is_symbolic, gradients)):
            if call_compiled(self._clip_and_apply_tensors, gradients) is not None:
                return
        self.apply(self.clip(gradients), compiles_large=compiles is None)

    def update(self, gradients: Sequence[Any], *, compiles_large: bool) -> None:
        """Decays the weights and updates the variables, without clipping and moving averages.

        With `compiles_large` XLA compiles the updates of large variables, if all devices are CPUs.
        """
        large = self._update_large(gradients) if compiles_large else []
        remaining = [position for position in range(len(gradients)) if position not in large]
        if remaining or not large:
            self._update([gradients[position] for position in remaining], [self.variables[p] for p in remaining])

    def _update_large(self, gradients: Sequence[Any]) -> list[int]:
        """Updates large variables by XLA; returns the positions of those that were updated."""
        if not is_of_each_variable(self.optimizer) or not compiles_on_cpus():
            return []
        sizes = [gradient.shape.num_elements() if is_symbolic(gradient) else None for gradient in gradients]
        large = [position for position, size in enumerate(sizes) if size and size >= LARGE_UPDATE]
        variables = [self.variables[position] for position in large]

        def update_large(*tensors: tf.Tensor) -> list[tf.Tensor]:
            self._update(tensors, variables)
            return []

        if large and call_compiled(update_large, [gradients[position] for position in large]) is not None:
            return large
        return []

    def _clip_and_apply_tensors(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        self.apply(self.clip(tensors))
        return []

    def apply(self, gradients: Sequence[Any], *, compiles_large: bool = False) -> None:
        """Decays the weights, and updates the variables and their moving averages."""
        optimizer = self.optimizer
        self.update(gradients, compiles_large=compiles_large)
        if optimizer.use_ema:
            optimizer._update_model_variables_moving_average(optimizer._trainable_variables)
            if optimizer.ema_overwrite_frequency:
                cond_over_replicas(
                    is_time_of_averages(optimizer),
                    lambda: optimizer._overwrite_model_variables_with_average_value(optimizer._trainable_variables),
                    lambda: None,
                )

    def _update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        optimizer = self.optimizer
        if is_equal_on_replicas(optimizer) and call_shared(
            lambda traced_gradients: self._update_parts(traced_gradients, variables),
            list(gradients),
            [getattr(variable, "_value", variable) for variable in (*optimizer.variables, *variables)],
            (id(optimizer), id(optimizer._learning_rate), settings(optimizer)),
            held=(optimizer, optimizer._learning_rate),
        ):
            return
        self._update_parts(gradients, variables)

    def _update_parts(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        with reduced_gradients(), shared_operations() if is_of_keras(self.optimizer) else contextlib.nullcontext():
            self.optimizer._apply_weight_decay(variables)
            self.optimizer._backend_update_step(list(gradients), variables, self.optimizer.learning_rate)


def build_outside_trace(optimizer: Any, variables: Sequence[Any]) -> None:
    """Builds an optimizer eagerly while a step is traced. The `variables` must have values."""

    def build() -> None:
        with optimizer._distribution_strategy.scope(), keras.name_scope(optimizer.name):
            optimizer.build(list(variables))
        optimizer.built = True

    # A new thread is in no scope and no replica context, and traces nothing.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(build).result()


def update_hooks(optimizer: Any) -> UpdateHooks | None:
    """Returns how an optimizer updates if tfdist updates its variables."""
    return _of_stock_strategies.get(optimizer) or hooks_of(optimizer._distribution_strategy).optimizers


def update_by(optimizer: Any, hooks: UpdateHooks) -> None:
    """Makes an optimizer of one of TensorFlow's strategies update by `hooks`."""
    patch_optimizers()
    _of_stock_strategies[optimizer] = hooks


@patch
def patch_optimizers() -> None:
    """Makes optimizers that have `update_hooks` update by them, and their schedules count updates.

    Keras' own order (clip, reduce, average on every micro-step; detect an overflow in a replica's own gradients) is
    implemented in private methods of its optimizer classes, which custom loops call without involving the strategy.
    """
    apply_gradients, reduce_gradients = TFOptimizer._backend_apply_gradients, TFOptimizer._all_reduce_sum_gradients
    overwrite = TFOptimizer._overwrite_variables_directly_with_gradients
    learning_rate = TFOptimizer._get_current_learning_rate

    def once_a_step(owner: Any, apply: Callable[..., Any]) -> None:
        stock = owner.apply

        @replace(owner, "apply")
        def apply_once(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
            hooks = update_hooks(self)
            if hooks is None:
                return stock(self, grads, trainable_variables)
            variables = None if trainable_variables is None else list(trainable_variables)
            is_outside = is_outside_of_replicas(self._distribution_strategy)
            if not self.built and variables:
                (build_outside_trace if is_outside and tf.executing_eagerly() else hooks.build)(self, variables)
            of_all = self._trainable_variables if variables is None and self.built else variables or []
            are_values = [self._overwrite_variable_with_gradient(variable) for variable in of_all]
            if is_outside:
                on_replica = functools.partial(apply_once, self, trainable_variables=variables)
                return apply_on_replicas(self._distribution_strategy, on_replica, list(grads), are_values)
            return hooks.together(lambda total: apply(self, total, variables), list(grads), are_values)

    once_a_step(TFOptimizer, TFOptimizer.apply)
    once_a_step(keras.optimizers.LossScaleOptimizer, apply_scaled)

    @replace(TFOptimizer, "_backend_apply_gradients")
    def update_over_replicas(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        hooks = update_hooks(self)
        if hooks is None:
            return apply_gradients(self, grads, trainable_variables)
        return hooks.update(OptimizerUpdate(self, trainable_variables, current_loss_scale()), list(grads))

    @replace(TFOptimizer, "_overwrite_variables_directly_with_gradients")
    def overwrite_with_largest(self: Any, grads: Sequence[Any], vars: Sequence[Any]) -> Any:
        if update_hooks(self) is not None:
            grads = [
                _largest_of_replicas(gradient) if self._overwrite_variable_with_gradient(variable) else gradient
                for gradient, variable in zip(grads, vars, strict=True)
            ]
        return overwrite(self, grads, vars)

    @replace(TFOptimizer, "_all_reduce_sum_gradients")
    def reduce_gradients_once(self: Any, grads_and_vars: Any) -> Any:
        return list(grads_and_vars) if _reduced.get() else reduce_gradients(self, grads_and_vars)

    @replace(TFOptimizer, "_get_current_learning_rate")
    def learning_rate_by_updates(self: Any) -> Any:
        schedule = self._learning_rate
        is_ours = self in _of_stock_strategies or has_hooks(self._distribution_strategy)
        if is_ours and isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            return schedule(self.iterations)
        return learning_rate(self)


def _largest_of_replicas(value: Any) -> tf.Tensor:
    """Returns the element-wise maximum over the replicas, for float8's scales and largest magnitudes."""
    gathered = tf.distribute.get_replica_context().all_gather(tf.convert_to_tensor(value)[tf.newaxis], axis=0)
    return tf.reduce_max(gathered, axis=0)
