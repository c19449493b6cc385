"""The groups of an optimizer's variables that are exchanged together, with their anchors and outer optimizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.outer_optimizers import new_outer_optimizer, trained_variables
from tfdist.local_updates.local_modes import DiLoCo, LocalMode
from tfdist.local_updates.schedule import split_by_bytes
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable


@dataclass(frozen=True)
class Fragment:
    """Variables that are exchanged together.

    Attributes:
        variables: The trained variables.
        anchors: Their shared values, float32, equal on all workers.
        outer: The optimizer that updates the anchors; `None`: they become the mean of the workers' weights.
        paths: The unique paths of the variables, under which compressors keep their state.
    """

    variables: list[Any]
    anchors: list[Any]
    outer: Any
    paths: list[str]


def new_fragments(optimizer: Any, mode: LocalMode) -> list[Fragment]:
    """Splits the variables of a built optimizer. Call this eagerly, in the scope of the strategy.

    Raises:
        ValueError: If there are fewer variables than fragments, or a variable cannot be averaged.
    """
    variables = trained_variables(optimizer)
    if mode.fragments > len(variables):
        raise ValueError(
            f"There are more fragments than variables. Received: fragments={mode.fragments} and an optimizer of "
            f"{len(variables)} variables. Expected: at most as many fragments. Lower `fragments`."
        )
    paths = OptimizerUpdate(optimizer, variables).paths
    groups = split_by_bytes([_nbytes(variable) for variable in variables], mode.fragments)
    return [_new_fragment([variables[i] for i in group], [paths[i] for i in group], mode) for group in groups]


def held_sums(fragments: Sequence[Fragment]) -> list[list[tf.Variable]]:
    """Returns variables on the host for the sums of each fragment."""
    with tf.device("CPU:0"):
        return [
            [ResourceVariable(tf.zeros(anchor.shape), trainable=False, name="held_sum") for anchor in fragment.anchors]
            for fragment in fragments
        ]


def _new_fragment(variables: list[Any], paths: list[str], mode: LocalMode) -> Fragment:
    anchors = [
        keras.Variable(
            shape=variable.shape, initializer="zeros", dtype="float32", autocast=False, name=f"anchor_{number}"
        )
        for number, variable in enumerate(variables)
    ]
    outer = None
    if isinstance(mode, DiLoCo):
        described = mode.outer_optimizer
        outer = new_outer_optimizer(_default_outer if described is None else described, anchors)
    return Fragment(variables, anchors, outer, paths)


def _default_outer() -> Any:
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def _nbytes(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements() or 0) * tf.as_dtype(variable.dtype).size
