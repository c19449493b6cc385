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

from tfdist.keras_internals.keras_updates import averages_of, has_own_update_step, has_own_weight_decay
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.placed_variables import held_variable, shared_optimizer_variables


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
    shared = [] if has_own_weight_decay(optimizer) else shared_optimizer_variables(optimizer)
    values = [held_variable(one).read_value() for one in shared]
    if has_own_update_step(optimizer):  # which must run once for all variables
        return _update(optimizer, list(variables), list(gradients), [], [], compiles_large=False)
    groups: dict[str, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for variable, gradient in zip(variables, gradients, strict=True):
        group = groups[held_variable(variable).device]
        group[0].append(variable)
        group[1].append(gradient)
    for device, (own, of_own) in groups.items():
        with tf.device(device):
            is_cpu = tf.DeviceSpec.from_string(device).device_type == "CPU"
            update = _update_function(optimizer, own, shared, compiles_large=compiles_large and is_cpu)
            update(of_own, [tf.identity(value) for value in values])


def average_by_device(optimizer: Any, variables: Sequence[keras.Variable]) -> None:
    """Updates the moving averages of variables without a gradient, which Keras averages, too.

    Args:
        optimizer: The optimizer, without its loss scale.
        variables: The variables.
    """
    shared = shared_optimizer_variables(optimizer)
    values = [held_variable(one).read_value() for one in shared]
    groups: dict[str, list[Any]] = defaultdict(list)
    for variable in variables:
        groups[held_variable(variable).device].append(variable)

    def average(own: list[Any], scalars: Sequence[tf.Tensor]) -> None:
        with keras.StatelessScope(list(zip(shared, scalars, strict=True))):
            _average(optimizer, own)

    for device, own in groups.items():
        with tf.device(device):
            scalars = [tf.identity(value) for value in values]
            function = functools.partial(average, own)
            tf.function(function, autograph=False, experimental_attributes={"_noinline": True})(scalars)


def _update_function(
    optimizer: Any, variables: list[keras.Variable], shared: Sequence[keras.Variable], *, compiles_large: bool
) -> Callable[[list[Any], list[tf.Tensor]], None]:
    def update(gradients: list[Any], values: list[tf.Tensor]) -> None:
        _update(optimizer, variables, gradients, shared, values, compiles_large=compiles_large)

    return tf.function(update, autograph=False, experimental_attributes={"_noinline": True})


def _update(
    optimizer: Any,
    variables: list[keras.Variable],
    gradients: list[Any],
    shared: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
    *,
    compiles_large: bool,
) -> None:
    """Updates variables of one device; `values` are those of the scalars that all devices share."""
    scope = keras.StatelessScope(list(zip(shared, values, strict=True))) if shared else None
    if scope is None:
        return _apply(optimizer, variables, gradients, compiles_large=compiles_large)
    with scope:
        _apply(optimizer, variables, gradients, compiles_large=compiles_large)
    mapped = {id(one) for one in shared}
    for variable in optimizer.variables:  # that the optimizer has assigned as Keras' variables
        value = scope.get_current_value(variable)
        if id(variable) not in mapped and value is not None:
            held_variable(variable).assign(value)


def _apply(optimizer: Any, variables: list[keras.Variable], gradients: list[Any], *, compiles_large: bool) -> None:
    update = OptimizerUpdate(optimizer, variables)
    update.update(gradients, compiles_large=compiles_large)
    finish_update(optimizer, update, variables)


def finish_update(optimizer: Any, update: OptimizerUpdate, variables: list[keras.Variable]) -> None:
    """Updates the moving averages of variables of one device, then applies their constraints, in Keras' order."""
    if optimizer.use_ema:
        _average(optimizer, variables)
    update.constrain()


def _average(optimizer: Any, variables: list[keras.Variable]) -> None:
    """Updates the moving averages of weights, and replaces the weights by them if it is time."""
    pairs = averages_of(optimizer, variables)
    is_later = tf.not_equal(tf.convert_to_tensor(optimizer.iterations), 0)
    for held, average in pairs:
        with tf.device(held.device):
            momentum = tf.cast(is_later, held.dtype) * optimizer.ema_momentum
            average.assign(momentum * average + (1 - momentum) * held)
    if optimizer.ema_overwrite_frequency:
        is_time = tf.equal((optimizer.iterations + 1) % optimizer.ema_overwrite_frequency, 0)

        def overwrite() -> None:
            for held, average in pairs:
                with tf.device(held.device):
                    held.assign(average)

        tf.cond(is_time, doing(overwrite), doing(lambda: None))


def doing(function: Callable[[], None]) -> Callable[[], tf.Tensor]:
    """Returns a branch of a condition, which must return a tensor."""

    def branch() -> tf.Tensor:
        function()
        return tf.constant(True)

    return branch
