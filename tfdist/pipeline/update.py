"""One optimizer update of all columns, each phase on the devices of the variables, with Keras' own rules.

Only scalars leave the device of a variable: squares of norms, and whether gradients are finite. The variables of each
device are updated by one function, as TensorFlow optimizes each function separately. In one graph for all columns it
rewrites the arithmetic of one column otherwise than that of another, so their weights would differ in the last bit.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.gradient_tensors import divided, values_of
from tfdist.keras_internals.keras_updates import (
    averaged_variables,
    averages_of,
    count_micro_step,
    has_own_update_step,
    has_own_weight_decay,
    is_time_of_averages,
    moved_average,
    positions_of_gradients,
)
from tfdist.keras_internals.optimizers import LossScale, OptimizerUpdate
from tfdist.keras_internals.placed_variables import held_variable, optimizer_and_loss_scale, shared_optimizer_variables
from tfdist.pipeline.columns import Columns
from tfdist.updates.clipping import clip, squares_dtype, sum_of_squares
from tfdist.updates.update_engine import run_micro_step


def loss_scale_of(optimizer: Any) -> tf.Tensor:
    """Returns the factor by which the optimizer scales the loss, a float32 scalar."""
    return tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)


def unscaling_of(optimizer: Any) -> Callable[[Any], Any]:
    """Returns the function that divides a gradient by the factor of the loss.

    Gradients are divided before they are compressed: residuals must not depend on a factor, which may change.
    """
    inner, outer = optimizer_and_loss_scale(optimizer)
    factor = inner.loss_scale_factor if outer is None else LossScale(outer).value
    if factor is None:
        return lambda gradient: gradient
    return lambda gradient: divided(gradient, factor)


def updates_weights(optimizer: Any) -> "int | tf.Tensor":
    """Returns 1 if the present step updates the weights, 0 if it only accumulates; an int or an int64 scalar."""
    update = OptimizerUpdate(optimizer_and_loss_scale(optimizer)[0], [])
    steps = update.accumulation_steps
    return 1 if steps == 1 else tf.cast(tf.equal((update.micro_steps + 1) % steps, 0), tf.int64)


def update_columns(
    optimizer: Any,
    variables: Sequence[keras.Variable],
    gradients: Sequence[Sequence[Any]],
    columns: Columns,
    *,
    compiles_large: bool,
) -> None:
    """Updates the trainable `variables` of all columns as the compiled optimizer would update them in one process.

    `gradients` are by column and variable, of the loss of the batch; equal in all columns, on the devices of their
    variables, and None for a variable that the loss does not depend on. XLA may compile the updates of large variables
    on CPUs if `compiles_large`.
    """
    inner, outer = optimizer_and_loss_scale(optimizer)
    known = positions_of_gradients(inner, gradients[0], variables)
    chosen = [variables[index] for index in known]
    update = OptimizerUpdate(inner, chosen, None if outer is None else LossScale(outer))
    held = ColumnUpdate(update, columns, compiles_large=compiles_large)
    run_micro_step(held, [of_column[index] for of_column in gradients for index in known])
    count_micro_step(inner)


class ColumnUpdate:
    """The `HeldUpdate` of all columns, which hold copies and parts of gradients.

    Gradients are those of the first column, one for each variable, then those of the second column, and so on. They are
    already sums over all columns, and unscaled.
    """

    exchanges_micro_steps = True

    def __init__(self, update: OptimizerUpdate, columns: Columns, *, compiles_large: bool) -> None:
        self.update, self._columns = update, columns
        self._optimizer, self._variables = update.optimizer, update.variables
        # XLA rounds differently on CPUs with different instructions, but columns must stay bit-identical.
        self._compiles_large = compiles_large and len(columns) == 1
        self.numbers: Sequence[int] = [*range(len(self._variables))] * len(columns)
        accumulators: list[tf.Variable] = []
        self._devices: list[str] = []
        for column in range(len(columns)):
            with columns.entered(column):
                self._devices += [held_variable(variable).device for variable in self._variables]
                accumulators += update.accumulators if update.accumulation_steps > 1 else []
        self.accumulators: Sequence[tf.Variable] = accumulators

    def exchange(self, gradients: Sequence[Any], divisor: Any, contributes: tf.Tensor | None) -> list[Any]:
        """See `HeldUpdate`; nothing is left to be done but to add up rows of the same index, as Keras does."""
        del divisor, contributes
        return self.each(tf.convert_to_tensor, gradients) if self.accumulators else list(gradients)

    def each(self, function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
        """See `HeldUpdate`. `values` may be those of the first columns alone."""
        results = []
        for device, of_one in zip(self._devices, zip(*values, strict=True), strict=False):
            with tf.device(device):
                results.append(function(*of_one))
        return results

    def write(self, function: Callable[..., Any], *values: Sequence[Any]) -> None:
        """See `HeldUpdate`."""
        self.each(function, self.accumulators, *values)

    def all_finite(self, gradients: Sequence[Any]) -> tf.Tensor:
        """See `HeldUpdate`."""
        flags = self.each(lambda one: tf.reduce_all(tf.math.is_finite(values_of(one))), self._of_model(gradients))
        return tf.reduce_all(tf.stack(flags))

    def squares(self, gradients: Sequence[Any], *, of_parts: bool) -> Sequence[tf.Tensor | None]:
        """See `HeldParts`."""
        dtype, count = squares_dtype(gradients), len(self._variables)
        own = self.each(lambda one: sum_of_squares(one, dtype), self._of_model(gradients))
        return [
            tf.add_n(own[number::count]) if self._is_split(variable) else None if of_parts else own[number]
            for number, variable in enumerate(self._variables)
        ]

    def clip_and_apply(self, gradients: Sequence[Any]) -> None:
        """See `HeldUpdate`. Constraints are applied, too."""
        clipped, count = clip(self, gradients), len(self._variables)
        of_columns = [clipped[first : first + count] for first in range(0, len(clipped), count)]
        update_together = self._columns.joint_update(self._optimizer)
        together = [index for index, one in enumerate(self._variables) if update_together and self._is_split(one)]
        alone = [index for index in range(count) if index not in together]
        others = [variable for variable in averaged_variables(self._optimizer) if self._columns.holds(variable)]
        others = [variable for variable in others if not any(variable is known for known in self._variables)]
        for column, of_column in enumerate(of_columns):
            with self._columns.entered(column):
                average_by_device(self._optimizer, others)
                variables, own = [self._variables[index] for index in alone], [of_column[index] for index in alone]
                apply_by_device(self._optimizer, variables, own, compiles_large=self._compiles_large)
        if together and update_together:
            own_parts = [[of_column[index] for index in together] for of_column in of_columns]
            update_together(self._optimizer, [self._variables[index] for index in together], own_parts, self._columns)

    def _of_model(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the columns that share the first copy of the model; other columns have equal ones."""
        return gradients[: self._columns.ways * len(self._variables)]

    def _is_split(self, variable: keras.Variable) -> bool:
        return id(variable) in self._columns.axes


class SeparateFunctions:
    """Calls functions that TensorFlow optimizes by themselves, so that all columns round equally.

    In them, copies on the present device stand for the scalars of the optimizer that all devices share.
    """

    def __init__(self, optimizer: Any, *, copies_scalars: bool = True) -> None:
        """Reads the scalars of `optimizer`, which is without its loss scale."""
        self._optimizer = optimizer
        self._shared = shared_optimizer_variables(optimizer) if copies_scalars else []
        self._values = [held_variable(variable).read_value() for variable in self._shared]

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function`, which takes and returns tensors."""

        def separate(values: list[tf.Tensor], *given: Any) -> Any:
            if not self._shared:
                return function(*given)
            with keras.StatelessScope(list(zip(self._shared, values, strict=True))) as scope:
                result = function(*given)
            changed = set(scope.state_mapping) - {id(variable) for variable in self._shared}
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

    The optimizer is without its loss scale. Gradients are clipped, and on the devices of their variables. XLA compiles
    the updates of large variables on CPUs if `compiles_large`.
    """
    if has_own_update_step(optimizer):  # which must run once for all variables
        return _apply(optimizer, list(variables), False, list(gradients))
    separate = SeparateFunctions(optimizer, copies_scalars=not has_own_weight_decay(optimizer))
    for device, positions in _by_device(variables).items():
        own = [variables[position] for position in positions]
        is_cpu = tf.DeviceSpec.from_string(device).device_type == "CPU"
        update = functools.partial(_apply, optimizer, own, compiles_large and is_cpu)
        with tf.device(device):
            separate(update, [gradients[position] for position in positions])
    return None


def average_by_device(optimizer: Any, variables: Sequence[keras.Variable]) -> None:
    """Updates the moving averages of variables without a gradient, which Keras averages, too."""
    separate = SeparateFunctions(optimizer)
    for device, positions in _by_device(variables).items():
        with tf.device(device):
            separate(functools.partial(_average, optimizer, [variables[position] for position in positions]))


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
