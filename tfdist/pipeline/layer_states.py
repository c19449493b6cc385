"""The values of a stage's variables during a step: weights, and states that layers change.

Most states are passed from micro-batch to micro-batch, such as the counts of random generators. Moving statistics of
batch normalization are computed by each micro-batch from those before the step, and averaged by samples, as the
replicas of a mirrored strategy do.
"""

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable
from tfdist.pipeline.batch_rows import MicroBatch
from tfdist.pipeline.stages import ModelStages, Stage
from tfdist.pipeline.transfers import WEIGHT, record_transfer

_SEEDS_APART = 0x9E3779B1  # odd, so that products with small numbers differ


class StageValues:
    """The values of one stage's variables in one column.

    Attributes:
        current: Those for the next micro-batch, in the order of the stage's variables.
        trainable: The positions of the variables that are trained.
    """

    def __init__(
        self, stage: Stage, values: list[tf.Tensor], trainable: Collection[int], averaged: Collection[int]
    ) -> None:
        """Starts with the values before the step.

        Args:
            stage: The stage.
            values: Of its variables.
            trainable: The ids of the variables that are trained.
            averaged: The ids of moving statistics.
        """
        self.current = values
        self.trainable = [i for i, variable in enumerate(stage.variables) if id(variable) in trainable]
        self._positions = {id(variable): i for i, variable in enumerate(stage.variables)}
        self._averaged = averaged
        self._sums: dict[int, tf.Tensor] = {}
        self._changed: set[int] = set()

    def update(self, changed: Sequence[keras.Variable], states: Sequence[tf.Tensor], part: MicroBatch) -> None:
        """Takes the states that a micro-batch leaves."""
        for variable, state in zip(changed, states, strict=True):
            key = id(variable)
            self._changed.add(key)
            if key in self._averaged:
                share = state * tf.cast(part.fraction, state.dtype)
                self._sums[key] = self._sums[key] + share if key in self._sums else share
            else:
                self.current[self._positions[key]] = state

    @property
    def states(self) -> dict[int, tf.Tensor]:
        """By the id of a variable, its state after the micro-batches; of a moving statistic this column's share."""
        return {
            key: self._sums[key] if key in self._sums else self.current[self._positions[key]] for key in self._changed
        }


def read_values(
    stages: ModelStages, stage: Stage, devices: Sequence[str], seeds: Collection[int], column: int
) -> list[tf.Tensor]:
    """Returns the values of a stage's variables on its device, each read once where it is.

    Stages that share a random generator, and columns, draw different numbers.

    Args:
        stages: All stages.
        stage: The one that reads.
        devices: By stage, in this column.
        seeds: The ids of the states of random generators.
        column: The number of the column.
    """
    values = []
    for variable in stage.variables:
        held, owner = held_variable(variable), stages.owner[id(variable)]
        with tf.device(held.device):
            value = held.read_value()
        record_transfer(WEIGHT, [value], devices[stage.index])
        with tf.device(devices[stage.index]):
            value = tf.identity(value)
            stream = column * len(devices) + stage.index - owner
            if id(variable) in seeds and stream:
                value += tf.constant([stream * _SEEDS_APART % 2**32, 0], value.dtype)
        values.append(value)
    return values


def changed_states(
    stages: ModelStages, columns: Sequence[Sequence[StageValues]], seeds: Collection[int], averaged: Collection[int]
) -> dict[int, list[tf.Tensor]]:
    """Returns by the id of a variable the states of all columns that its owner leaves.

    Raises:
        ValueError: Layers in several stages change the same variable.
    """
    found: dict[int, list[tf.Tensor]] = {}
    for stage in stages.stages:
        of_columns = [values[stage.index].states for values in columns]
        for key in of_columns[0]:
            if stages.owner[key] == stage.index:
                found[key] = [states[key] for states in of_columns]
            elif key not in seeds:
                name = next(variable.path for variable in stage.variables if id(variable) == key)
                raise ValueError(
                    f"Two stages change the same variable. Received: {name!r}, changed by the stages "
                    f"{stages.owner[key]} and {stage.index}. Expected: all calls of a layer with such a state in one "
                    "stage. Choose other `cuts`, or use a separate layer in each stage."
                )
    return found


def combined_state(
    variable: keras.Variable, of_columns: list[tf.Tensor], before: tf.Tensor, *, is_average: bool
) -> Any:
    """Returns the state of all columns after a step.

    Args:
        variable: The variable.
        of_columns: Its state in each column.
        before: Its value before the step.
        is_average: Whether it is a moving statistic, of which each column has its share.
    """
    if len(of_columns) == 1:
        return of_columns[0]
    if is_average or variable.aggregation in ("sum", "mean"):
        record_transfer(WEIGHT, of_columns, before.device)
    if is_average:
        return tf.add_n(of_columns)
    if variable.aggregation == "sum":
        return before + tf.add_n([state - before for state in of_columns])
    if variable.aggregation == "mean":
        return tf.cast(tf.add_n(of_columns) / len(of_columns), before.dtype)
    return of_columns[0]
