"""Optimizers whose slots are split over the replicas: which can be, what a replica owns, moving averages of weights."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TFOptimizer
from tfdist.keras_internals.keras_updates import is_of_each_value
from tfdist.keras_internals.split_slot import SplitSlot, is_updating_parts
from tfdist.keras_internals.split_weight import SplitWeight
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import hooks_of
from tfdist.utils.weak_identity_map import WeakIdentityMap

_ACCUMULATOR = "gradient_accumulator"  # where a replica sums its gradients, or those of all for its part


class SplitSlots:
    """The layout of one optimizer's slots.

    Attributes:
        sharding: The `StateSharding` of the strategy.
        layout: The owners of the values of slots.
        is_whole: Whether each variable has one owner, by which it is updated.
        is_used: Whether the optimizer has slots.
        exact_weights: The weights that all replicas hold rounded, by position, if their updates are sent rounded. They
            count where they round to the present weight. Elsewhere the program has assigned another one.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], sharding: Any, *, is_whole: bool) -> None:
        self.sharding = sharding
        self.is_whole = is_whole
        self._positions = {optimizer._var_key(variable): number for number, variable in enumerate(variables)}
        in_parts = [position for position, variable in enumerate(variables) if isinstance(variable, SplitWeight)]
        specs = [_spec(optimizer, variable) for variable in variables]
        self.layout = sharding.plan(specs, is_whole=is_whole, in_parts=in_parts)
        self.exact_weights = self._new_exact_weights(optimizer, variables)
        self.is_used = bool(self.exact_weights or in_parts)
        self._factors = [
            p for p, candidate in enumerate(variables) if _is_factored(optimizer, candidate) for _ in range(2)
        ]

    def _new_exact_weights(self, optimizer: Any, variables: Sequence[Any]) -> dict[int, SplitSlot]:
        exact_weights = {}
        for position, variable in enumerate(variables) if self.sharding.options.weights_dtype else ():
            bounds = [(span.start, span.stop) for span in self.layout.spans(position)]
            if tf.as_dtype(variable.dtype) == tf.float32 and any(stop > start for start, stop in bounds):
                name = f"{_name_of(variable)}_exact"
                exact_weights[position] = self._created(bounds, "zeros", variable.shape, variable.dtype, name)
        return exact_weights

    def splits_accumulators(self, optimizer: Any, variable: Any) -> bool:
        """Whether sums of gradients are split, too; not those of variables that are overwritten by their gradient."""
        is_requested = self.sharding.options.accumulators or self.sharding.options.weights
        return bool(is_requested) and not optimizer._overwrite_variable_with_gradient(variable)

    def new_slot(self, optimizer: Any, variable: Any, name: str, initializer: Any) -> SplitSlot | None:
        """Returns a slot for `variable`; `None` if the optimizer was not built for it."""
        position = self._positions.get(optimizer._var_key(variable))
        if position is None:
            return None
        bounds = [(span.start, span.stop) for span in self.layout.spans(position)]
        self.is_used = True
        return self._created(bounds, initializer, variable.shape, variable.dtype, name)

    def new_factor(self, shape: Sequence[int], initializer: Any, dtype: Any, name: str) -> SplitSlot | None:
        """Returns the next factor of a slot of Adafactor, which has two of each matrix; `None` if there is none."""
        if not self._factors:
            return None
        size = int(np.prod(shape))
        spans = self.layout.spans(self._factors.pop(0))
        bounds = [(0, size if span.stop > span.start else 0) for span in spans]
        self.is_used = True
        return self._created(bounds, initializer, shape, dtype, name)

    def _created(
        self, bounds: Sequence[tuple[int, int]], initializer: Any, shape: Any, dtype: Any, name: str
    ) -> SplitSlot:
        return SplitSlot(
            bounds,
            self.sharding.devices,
            self.sharding.first,
            self.sharding.gather,
            is_whole=self.is_whole,
            initializer=keras.initializers.get(initializer),
            shape=shape,
            dtype=dtype,
            trainable=False,
            name=name,
        )


_split: WeakIdentityMap[SplitSlots] = WeakIdentityMap()


def split_slots(optimizer: Any) -> SplitSlots | None:
    """Returns the layout of the slots of an optimizer; `None` if they are whole, or if it has none."""
    slots = _split.get(optimizer)
    return slots if slots is not None and slots.is_used else None


@patch
def patch_sharded_optimizers() -> None:
    """Makes optimizers create split slots, under strategies that say how."""
    build, add = TFOptimizer.build, TFOptimizer.add_variable_from_reference
    add_factor = keras.optimizers.Adafactor.add_variable

    @replace(TFOptimizer, "build")
    def build_with_layout(self: Any, variables: Any) -> Any:
        strategy = self._distribution_strategy
        hooks = hooks_of(strategy)
        if hooks.has_copies and hooks.are_weights_apart(strategy):
            _check_updates_values(self)
        sharding = (
            None if isinstance(self, keras.optimizers.LossScaleOptimizer) else hooks_of(strategy).sharding(strategy)
        )
        if sharding is not None:
            is_whole = owns_whole_variables(self)
            if is_whole is not None:
                _split[self] = SplitSlots(self, variables, sharding, is_whole=is_whole)
        return build(self, variables)

    @replace(TFOptimizer, "add_variable_from_reference")
    def add_split(self: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
        slots = _split.get(self)
        if slots is None or (name == _ACCUMULATOR and not slots.splits_accumulators(self, reference_variable)):
            return add(self, reference_variable, name=name, initializer=initializer)
        with keras.name_scope(self.name, caller=self):
            slot = slots.new_slot(
                self, reference_variable, f"{_name_of(reference_variable)}_{name or 'var'}", initializer
            )
        if slot is None:
            return add(self, reference_variable, name=name, initializer=initializer)
        self._track_variable(slot)
        return slot

    @replace(keras.optimizers.Adafactor, "add_variable")
    def add_split_factor(self: Any, shape: Any, initializer: Any = "zeros", dtype: Any = None, **more: Any) -> Any:
        slots = _split.get(self)
        slot = None
        if slots is not None and set(more) <= {"name"}:
            with keras.name_scope(self.name, caller=self):
                slot = slots.new_factor(shape, initializer, dtype, more.get("name") or "factor")
        if slot is None:
            return add_factor(self, shape, initializer=initializer, dtype=dtype, **more)
        self._track_variable(slot)
        return slot

    def assign_whole(name: str) -> None:
        stock = getattr(TFOptimizer, name)

        @replace(TFOptimizer, name)
        def assign(self: Any, variable: Any, value: Any) -> Any:
            if isinstance(variable, SplitSlot) and not is_updating_parts():  # as `build` may do
                return getattr(variable, name)(value)
            return stock(self, variable, value)

    for name in ("assign", "assign_add", "assign_sub"):
        assign_whole(name)
    _patch_sharded_averages()


def _check_updates_values(optimizer: Any) -> None:
    """Raises an error if an optimizer needs whole variables, and weights are in parts."""
    leaves_updates = isinstance(optimizer, keras.optimizers.LossScaleOptimizer | keras.optimizers.MultiOptimizer)
    if not leaves_updates and not is_of_each_value(optimizer):
        raise ValueError(
            "With `shard_weights=True` an optimizer must update each value by itself. Received: "
            f"{type(optimizer).__name__}. Expected: SGD, Adam, AdamW, Adamax, Adagrad, Adadelta, RMSprop, Lion, Ftrl "
            "or ScheduleFreeAdamW, or a subclass that keeps their update. Use one of them, or create the strategy "
            "with `shard_optimizer_state=True` alone."
        )


def _name_of(variable: Any) -> str:
    """The name of a variable, as Keras begins those of its slots."""
    path: str = getattr(variable, "path", None) or variable.name.replace(":", "_")
    return path.replace("/", "_")


def _is_factored(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer keeps two factors in place of a slot for `variable`."""
    is_one = isinstance(optimizer, keras.optimizers.Adafactor) and len(variable.shape) > 1
    return is_one and not optimizer._overwrite_variable_with_gradient(variable)


def _spec(optimizer: Any, variable: Any) -> tf.TensorSpec:
    # A variable that is overwritten by its gradient (float8's scales) has no slots and no update.
    is_value = optimizer._overwrite_variable_with_gradient(variable)
    return tf.TensorSpec([0] if is_value else variable.shape, variable.dtype)


# tfdist does the work of these methods itself, on parts, so overrides in a subclass would have no effect.
_REPLACED = {
    "_backend_apply_gradients": "the order of an update",
    "_clip_gradients": "clipping, which needs the gradients of all variables",
    "_overwrite_model_variables_with_average_value": "the averages of weights",
    "_update_model_variables_moving_average": "the averages of weights",
    "add_variable_from_reference": "how slots are created",
}


def owns_whole_variables(optimizer: Any) -> bool | None:
    """Whether a replica has to own whole variables, because an update of a value may use others of the variable.

    Returns:
        `None` if the optimizer has no slots, because it leaves updates to other optimizers.

    Raises:
        ValueError: If its state cannot be split.
    """
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return None
    stock, cls = keras.optimizers.Optimizer, type(optimizer)  # Both have the methods that tfdist has replaced.
    method = next((name for name in _REPLACED if getattr(cls, name) is not getattr(stock, name)), None)
    if method is None:
        return not is_of_each_value(optimizer)
    raise ValueError(
        "`shard_optimizer_state=True` replaces a method that the optimizer's class defines. Received: "
        f"{type(optimizer).__name__}, which defines {method}: {_REPLACED[method]}. Expected: a class that defines "
        "`update_step`, `build` or `apply` alone. Create the strategy without `shard_optimizer_state`."
    )


@patch
def _patch_sharded_averages() -> None:
    """Makes Keras copy whole averages, gathered from all workers, where it copies between weights and averages."""
    callback = keras.callbacks.SwapEMAWeights

    def unless_split(owner: Any, name: str, copy: Callable[[Any, Any], None]) -> None:
        stock = getattr(owner, name)

        @replace(owner, name)
        def copy_all(self: Any, argument: Any) -> Any:
            optimizer = self if owner is TFOptimizer else argument
            if split_slots(optimizer) is None:
                return stock(self, argument)
            variables = argument if owner is TFOptimizer else optimizer._trainable_variables
            averages = optimizer._model_variables_moving_average
            for variable in variables:  # without those that were frozen, with those of other optimizers
                position = optimizer._trainable_variables_indices.get(optimizer._var_key(variable))
                average = None if position is None else averages[position]
                if average is not None:
                    copy(variable, average)
            return None

    unless_split(TFOptimizer, "_overwrite_model_variables_with_average_value", _overwrite)
    unless_split(callback, "_tf_swap_variables", _swap)
    unless_split(callback, "_tf_finalize_ema_values", _keep)


def _overwrite(variable: Any, average: Any) -> None:
    variable.assign(average.read_value())


def _swap(variable: Any, average: Any) -> None:
    weight = tf.identity(variable)
    variable.assign(average.read_value())
    average.assign(weight)


def _keep(variable: Any, average: Any) -> None:
    average.assign(tf.identity(variable))
