"""The parts of Keras' update of an optimizer that a step in stages calls one by one, on the devices of variables."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable
from tfdist.private_symbols import private

_OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"

for _path, _why in {
    f"{_OPTIMIZER}._check_variables_are_known": "rejects variables for which an optimizer was not built",
    f"{_OPTIMIZER}._filter_empty_gradients": "warns of variables without a gradient",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._clip_by_norm": "clips one gradient, where its variable is",
}.items():
    private(_path, _why)


def positions_of_gradients(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[int]:
    """Returns the positions of the variables that have a gradient. Warns of the others, as Keras does.

    Raises:
        ValueError: The optimizer was built for other variables, or no variable has a gradient.
    """
    optimizer._check_variables_are_known(variables)
    optimizer._filter_empty_gradients(list(gradients), list(variables))
    return [position for position, gradient in enumerate(gradients) if gradient is not None]


def count_micro_step(optimizer: Any) -> None:
    """Counts a step, which may only accumulate; `iterations` counts updates."""
    optimizer._iterations.assign_add(1)


def clip_by_norm(optimizer: Any) -> Callable[[Any], Any]:
    """Returns the function that clips a gradient by the optimizer's `clipnorm`."""
    return lambda gradient: optimizer._clip_by_norm(gradient)


def decay_weights(optimizer: Any, variables: Sequence[Any]) -> None:
    """Decays weights in place, also if they are `tf.Variable`s."""
    optimizer._apply_weight_decay(list(variables))


def averaged_variables(optimizer: Any) -> list[Any]:
    """Returns the variables of which an optimizer keeps moving averages, also those without a gradient; or none."""
    return list(optimizer._trainable_variables) if optimizer.use_ema else []


def averages_of(optimizer: Any, variables: Sequence[Any]) -> list[tuple[tf.Variable, tf.Variable]]:
    """Returns what holds each variable, and its moving average; without those that have none, as scales of float8."""
    averages = optimizer._model_variables_moving_average
    pairs = [(one, averages[optimizer._get_variable_index(one)]) for one in variables]
    return [(held_variable(one), held_variable(average)) for one, average in pairs if average is not None]
