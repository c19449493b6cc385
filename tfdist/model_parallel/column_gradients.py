"""The gradients of a batch by variable and column, from what the columns have computed by stage."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.model_parallel.column_reduction import ColumnGradient
from tfdist.model_parallel.column_run import added
from tfdist.model_parallel.columns import Columns
from tfdist.model_parallel.stages import ModelStages
from tfdist.model_parallel.transfers import WEIGHT_GRADIENT, record_transfer
from tfdist.model_parallel.update import unscaling_of


def gradients_of(model: Any, stages: ModelStages, columns: Columns, runs: Sequence[Any]) -> list[ColumnGradient]:
    """Returns the gradients of the loss of a batch, for each trainable variable those of the columns that sum them.

    These are all columns. Of columns that share a copy of the model, each sums its own gradients with those of the
    columns in the same place: first all variables of the first place follow each other, then those of the next one.

    Args:
        model: The Keras model.
        stages: Its stages.
        columns: Its columns.
        runs: By column, what it has computed.
    """
    of_columns = [_of_variables(stages, columns, run, column) for column, run in enumerate(runs)]
    unscale, gradients = unscaling_of(model.optimizer), []
    paths = OptimizerUpdate(model.optimizer, model.trainable_variables).paths
    for place in range(columns.ways):
        for variable, path in zip(model.trainable_variables, paths, strict=True):
            devices = columns.devices_of(variable)[place :: columns.ways]
            found: list[Any] = []
            for totals, device in zip(of_columns[place :: columns.ways], devices, strict=True):
                with tf.device(device):
                    total = totals.get(id(variable))
                    found.append(None if total is None else unscale(total))
            replicas, is_split = tuple(range(place, len(columns), columns.ways)), id(variable) in columns.axes
            shape = columns.shape_of_part(variable)
            gradients.append(ColumnGradient(path, shape, is_split, replicas, devices, found))
    return gradients


def by_column(sums: Sequence[Sequence[Any]], columns: Columns) -> list[list[Any]]:
    """Returns by column and variable the sums of the gradients that `gradients_of` returns."""
    count = len(sums[0]) // columns.ways
    return [list(of_copy[first : first + count]) for of_copy in sums for first in range(0, len(of_copy), count)]


def _of_variables(stages: ModelStages, columns: Columns, run: Any, column: int) -> dict[int, Any]:
    """Sums a column's gradients over the stages that share a variable, on the device that holds it."""
    totals: dict[int, Any] = {}
    for stage, values, gradients in zip(stages.stages, run.values, run.gradients, strict=True):
        for position, gradient in zip(values.trainable, gradients, strict=True):
            key, device = id(stage.variables[position]), columns.devices_of(stage.variables[position])[column]
            record_transfer(WEIGHT_GRADIENT, [gradient], device)
            with tf.device(device):
                totals[key] = added(totals.get(key), gradient)
    return totals
