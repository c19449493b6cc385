"""Updates of split variables by optimizers whose step for an element depends on the complete variable.

Adafactor and Muon: each device gathers the gradient, and of the variable and its slots what Keras' own `update_step`
reads; it computes the update of the complete variable, and keeps its part. So the bits are those of one process that
has the same gradients.

Lamb: the step depends on norms of a complete variable and of its update. Keras' own `update_step` computes the parts of
the update: for a weight of zeros and a learning rate of one it subtracts the update itself. Only the squares of the two
norms leave a device.
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_updates import decay_weights
from tfdist.keras_internals.placed_variables import held_variable, holding
from tfdist.keras_internals.updated_values import UpdatedValue, slots_of, update_step, updates_elements
from tfdist.pipeline.columns import Columns
from tfdist.pipeline.transfers import DENSE, WEIGHT, WEIGHT_GRADIENT, record_transfer
from tfdist.pipeline.update import SeparateFunctions, finish_update
from tfdist.tensor_parallel.split_variable import SplitVariable


def update_by_gathering(
    optimizer: Any, variables: Sequence[keras.Variable], gradients: Sequence[Sequence[Any]], columns: Columns
) -> None:
    """Decays and updates split variables, applies their constraints, and updates their moving averages.

    The optimizer is one of `GATHERING`, without its loss scale. `gradients` are clipped, by column and variable.
    """
    separate = SeparateFunctions(optimizer)
    for variable, of_columns in zip(variables, zip(*gradients, strict=True), strict=True):
        state = [variable, *filter(_is_split, slots_of(optimizer, variable))]
        # All are read before the first of them changes.
        read = [_read_parts(of_state) for of_state in state]
        for column, device in enumerate(columns.devices_of(variable)):
            with columns.entered(column), tf.device(device):
                _update_in_column(optimizer, state, read, of_columns, column, columns.ways, separate)


def _is_split(variable: keras.Variable) -> bool:
    return isinstance(held_variable(variable), SplitVariable)


def _read_parts(variable: keras.Variable) -> tuple[SplitVariable, list[tf.Tensor]]:
    held, parts = held_variable(variable), []
    for shard in held.shards:
        with tf.device(shard.device):
            parts.append(shard.read_value())
    return held, parts


def _update_in_column(
    optimizer: Any,
    state: Sequence[keras.Variable],
    read: Sequence[tuple[SplitVariable, list[tf.Tensor]]],
    gradients: Any,
    column: int,
    ways: int,
    separate: SeparateFunctions,
) -> None:
    """Updates a variable, the first of the `state`, in a column whose parts of variables are entered.

    It does so by a function that TensorFlow optimizes by itself, so that all columns round equally.
    """
    is_alone, first = updates_elements(optimizer, state[0]), column - column % ways
    group = slice(first, first + ways)
    values, device = [], held_variable(state[0]).device
    for variable, (held, parts) in zip(state, read, strict=True):
        value = parts[column] if is_alone else held.joined(parts[group])
        values.append(UpdatedValue(value, held_variable(variable), variable.path))
    gradient = gradients[column] if is_alone else _joined_gradient(gradients[group], read[0][0])

    def update() -> None:
        weights, *slots = values
        held_by = {id(slot): (slot, value) for slot, value in zip(state[1:], slots, strict=True)}
        own_parts = [held_variable(variable) for variable in state]
        with holding(held_by):
            update_step(optimizer, gradient, weights)
        for part, value, (held, _) in zip(own_parts, values, read, strict=True):
            if value.is_written:
                part.assign(value.value if is_alone else held.part_of(value.value, column))
        finish_update(optimizer, [state[0]])

    separate(update)
    if not is_alone:
        for kind in (WEIGHT_GRADIENT, DENSE):
            record_transfer(kind, gradients[group], device)
        for value, (_, parts) in zip(values, read, strict=True):
            record_transfer(WEIGHT, parts[group] if value.is_read else [], device)


def _joined_gradient(parts: Sequence[Any], held: SplitVariable) -> Any:
    """Returns the gradient of a complete variable; rows, if all parts are rows."""
    if not all(isinstance(part, tf.IndexedSlices) for part in parts):
        return held.joined([tf.convert_to_tensor(part) for part in parts])
    values, indices = [part.values for part in parts], [part.indices for part in parts]
    shape = tf.constant(held.shape.as_list(), tf.int64)
    if held.axis > 0:  # the same rows on all devices
        return tf.IndexedSlices(tf.concat(values, held.axis), indices[0], shape)
    rows = [of_part + tf.cast(held.bounds(index)[0], of_part.dtype) for index, of_part in enumerate(indices)]
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(rows, 0), shape)


def update_by_lamb(
    optimizer: Any, variables: Sequence[keras.Variable], gradients: Sequence[Sequence[Any]], columns: Columns
) -> None:
    """Does what `update_by_gathering` does, for a `keras.optimizers.Lamb`."""
    separate = SeparateFunctions(optimizer)
    for variable, of_columns in zip(variables, zip(*gradients, strict=True), strict=True):
        update_part = functools.partial(_update_of_part, optimizer, variable)
        apply = functools.partial(_apply, optimizer, variable)
        devices, parts = columns.devices_of(variable), []
        for column, (gradient, device) in enumerate(zip(of_columns, devices, strict=True)):
            with columns.entered(column), tf.device(device):
                parts.append(separate(update_part, gradient))
        for column, device in enumerate(devices):
            first = column - column % columns.ways
            of_column = parts[first : first + columns.ways]
            norms = [tf.sqrt(tf.add_n([part[index] for part in of_column])) for index in (1, 2)]
            with columns.entered(column), tf.device(device):
                separate(apply, parts[column][0], norms)


def _update_of_part(optimizer: Any, variable: keras.Variable, gradient: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the part of the update, and the squares of the norms of the part's weights and of the update."""
    held = held_variable(variable)
    part = UpdatedValue(tf.zeros(held.shape, held.dtype), held)
    decay_weights(optimizer, [held])
    optimizer.update_step(gradient, part, 1.0)
    update = -part.value
    return update, tf.reduce_sum(tf.square(held.read_value())), tf.reduce_sum(tf.square(update))


def _apply(optimizer: Any, variable: keras.Variable, update: tf.Tensor, norms: list[tf.Tensor]) -> None:
    held, (of_weights, of_update) = held_variable(variable), norms
    is_known = (of_weights > 0) & (of_update > 0)
    ratio = tf.where(is_known, of_weights / tf.where(is_known, of_update, 1), 1)
    held.assign_sub(ratio * tf.cast(optimizer.learning_rate, held.dtype) * update)
    finish_update(optimizer, [variable])
