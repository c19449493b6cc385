"""Applies gradients to the variables of each device by one function, with Keras' own rules of the optimizer.

TensorFlow optimizes each function separately. In one graph for all columns it rewrites the arithmetic of one column
otherwise than that of another, so their weights would differ in the last bit.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_updates import (
    averages_of,
    has_own_update_step,
    has_own_weight_decay,
    is_time_of_averages,
    moved_average,
)
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.placed_variables import held_variable, shared_optimizer_variables


class SeparateFunctions:
    """Calls functions that TensorFlow optimizes by themselves, so that all columns round equally.

    In them, copies on the present device stand for the scalars of the optimizer that all devices share.
    """

    def __init__(self, optimizer: Any, *, copies_scalars: bool = True) -> None:
        """Reads the scalars of `optimizer`, which is without its loss scale."""
        self._optimizer = optimizer
        self._shared = shared_optimizer_variables(optimizer) if copies_scalars else []
        self._values = [held_variable(one).read_value() for one in self._shared]

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function`, which takes and returns tensors."""

        def separate(values: list[tf.Tensor], *given: Any) -> Any:
            if not self._shared:
                return function(*given)
            with keras.StatelessScope(list(zip(self._shared, values, strict=True))) as scope:
                result = function(*given)
            changed = set(scope.state_mapping) - {id(one) for one in self._shared}
            for variable in self._optimizer.variables if changed else ():
                if id(variable) in changed:  # the optimizer has assigned it as Keras' variable
                    held_variable(variable).assign(scope.get_current_value(variable))
            return result

        noinline = {"_noinline": True}
        scalars = [tf.identity(value) for value in self._values]
        return tf.function(separate, autograph=False, experimental_attributes=noinline)(scalars, *arguments)


def apply_by_device(
    optimizer: Any, variables: Sequence[keras.Variable], gradients: Sequence[Any], *, compiles_large: bool
) -> None:
    """Decays and updates variables, applies their constraints, and updates their moving averages.

    Args:
        optimizer: The optimizer, without its loss scale.
        variables: Those that have a gradient.
        gradients: Clipped, on the devices of their variables.
        compiles_large: Whether XLA compiles the updates of large variables on CPUs.
    """
    if has_own_update_step(optimizer):  # which must run once for all variables
        return _apply(optimizer, list(variables), False, list(gradients))
    separate = SeparateFunctions(optimizer, copies_scalars=not has_own_weight_decay(optimizer))
    for device, positions in _by_device(variables).items():
        own, is_cpu = [variables[one] for one in positions], tf.DeviceSpec.from_string(device).device_type == "CPU"
        update = functools.partial(_apply, optimizer, own, compiles_large and is_cpu)
        with tf.device(device):
            separate(update, [gradients[one] for one in positions])
    return None


def average_by_device(optimizer: Any, variables: Sequence[keras.Variable]) -> None:
    """Updates the moving averages of variables without a gradient, which Keras averages, too.

    Args:
        optimizer: The optimizer, without its loss scale.
        variables: The variables.
    """
    separate = SeparateFunctions(optimizer)
    for device, positions in _by_device(variables).items():
        with tf.device(device):
            separate(functools.partial(_average, optimizer, [variables[one] for one in positions]))


def _by_device(variables: Sequence[keras.Variable]) -> dict[str, list[int]]:
    """The positions of the variables of each device."""
    found: dict[str, list[int]] = defaultdict(list)
    for position, variable in enumerate(variables):
        found[held_variable(variable).device].append(position)
    return found


def _apply(optimizer: Any, variables: list[keras.Variable], compiles_large: bool, gradients: list[Any]) -> None:
    OptimizerUpdate(optimizer, variables).update(gradients, compiles_large=compiles_large)
    finish_update(optimizer, variables)


def finish_update(optimizer: Any, variables: list[keras.Variable]) -> None:
    """Updates the moving averages of variables of one device, then applies their constraints, in Keras' order."""
    if optimizer.use_ema:
        _average(optimizer, variables)
    OptimizerUpdate(optimizer, variables).constrain()


def _average(optimizer: Any, variables: list[keras.Variable]) -> None:
    """Updates the moving averages of weights, and replaces the weights by them if it is time."""
    pairs = averages_of(optimizer, variables)
    for held, average in pairs:
        with tf.device(held.device):
            average.assign(moved_average(optimizer, average, held))
    if optimizer.ema_overwrite_frequency:

        def overwrite() -> None:
            for held, average in pairs:
                with tf.device(held.device):
                    held.assign(average)

        tf.cond(is_time_of_averages(optimizer), overwrite, lambda: None)
