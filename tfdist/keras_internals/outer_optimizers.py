"""Optimizers of workers that train by themselves, and the outer optimizers that update what the workers share."""

from collections.abc import Sequence
from typing import Any

import keras

from tfdist.keras_internals.optimizers import OptimizerUpdate


def exchanged_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that a built optimizer updates, whose values workers exchange.

    Raises:
        ValueError: If one of them is overwritten by its gradient, as the scales of float8.
    """
    variables = list(optimizer._trainable_variables)
    overwritten = [variable for variable in variables if optimizer._overwrite_variable_with_gradient(variable)]
    if overwritten:
        raise ValueError(
            "Local updates average weights, and this variable is the largest value of all replicas in each step. "
            f"Received: {overwritten[0].path!r}, a scale of float8. Expected: another dtype policy, or "
            "`mode=Synchronous()`."
        )
    return variables


def moving_averages(optimizer: Any) -> list[Any]:
    """Returns the moving averages of weights of a built optimizer, if it has any."""
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


def features_of_steps(optimizer: Any) -> list[str]:
    """Returns the features of an optimizer that have no meaning if it updates by differences of weights.

    >>> features_of_steps(keras.optimizers.SGD(1.0, use_ema=True)), features_of_steps(keras.optimizers.Adam())
    (['use_ema'], [])
    """
    is_used = {
        "LossScaleOptimizer": isinstance(optimizer, keras.optimizers.LossScaleOptimizer),
        "gradient_accumulation_steps": bool(optimizer.gradient_accumulation_steps),
        "use_ema": bool(optimizer.use_ema),
    }
    return [name for name, used in is_used.items() if used]


def new_outer_optimizer(described: Any, anchors: Sequence[Any]) -> Any:
    """Returns a new optimizer that is built for `anchors`. Call this in the strategy's scope.

    `described` is an optimizer, whose configuration is used, a function that returns one, or what
    `keras.optimizers.get` accepts.

    Raises:
        ValueError: If `described` is none of these, or the optimizer cannot be an outer one.
    """
    is_function = callable(described) and not isinstance(described, keras.optimizers.Optimizer)
    identifier = described() if is_function else described
    if not isinstance(identifier, keras.optimizers.Optimizer | str | dict):
        raise ValueError(
            f"Invalid `outer_optimizer`. Received: {described!r}. Expected: a function that returns a Keras optimizer, "
            "such as `lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`, a name, or a configuration."
        )
    if isinstance(identifier, keras.optimizers.Optimizer):
        optimizer = type(identifier).from_config(identifier.get_config())
    else:
        optimizer = keras.optimizers.get(identifier)
    if extra := features_of_steps(optimizer):
        raise ValueError(
            f"Invalid `outer_optimizer`. Received: {type(optimizer).__name__} with {', '.join(extra)}. Expected: a "
            "Keras optimizer without: it updates once an exchange."
        )
    optimizer.build(list(anchors))
    return optimizer


def update_anchors(optimizer: Any, anchors: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Updates this replica's copies of `anchors` by their outer optimizer, and counts the update.

    A gradient is the mean difference of an anchor and the workers' weights, equal on all replicas.
    """
    update = OptimizerUpdate(optimizer, anchors)
    update.clip_and_apply(list(gradients), False)
    update.take_back(-1)
