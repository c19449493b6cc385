"""The update of split variables by Lamb, whose step depends on norms of a complete variable and of its update.

Keras' own `update_step` computes the parts of the update: for a weight of zeros and a learning rate of one it subtracts
the update itself. Only the squares of the two norms leave a device.
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_updates import decay_weights
from tfdist.keras_internals.placed_variables import held_variable
from tfdist.keras_internals.sharded_variables import PartOfVariable
from tfdist.model_parallel.columns import Columns
from tfdist.model_parallel.device_updates import SeparateFunctions, finish_update


def update_by_lamb(
    optimizer: Any, variables: Sequence[keras.Variable], gradients: Sequence[Sequence[Any]], columns: Columns
) -> None:
    """Decays and updates split variables, applies their constraints, and updates their moving averages.

    Args:
        optimizer: A `keras.optimizers.Lamb`, without its loss scale.
        variables: The split variables that have a gradient.
        gradients: By column and variable, clipped.
        columns: The columns.
    """
    separate = SeparateFunctions(optimizer)
    for variable, of_columns in zip(variables, zip(*gradients, strict=True), strict=True):
        update_part, apply = (functools.partial(one, optimizer, variable) for one in (_update_of_part, _apply))
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
    part = PartOfVariable(tf.zeros(held.shape, held.dtype), held)
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
