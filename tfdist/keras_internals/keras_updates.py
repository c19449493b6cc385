"""Which optimizers update variables by Keras' own code, what replaces it, and on what an update's operations depend."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TFOptimizer
from tfdist.keras_internals.placed_variables import held_variable

# Updates of a variable that use its own slots alone, so that the order of the variables does not matter.
_UPDATES = tuple(
    getattr(keras.optimizers, name).update_step
    for name in "Adadelta Adagrad Adam Adamax AdamW Lion RMSprop SGD".split()
)

# Further updates of each value by its own slots, which XLA does not compile.
_OTHER_UPDATES_OF_VALUES = tuple(
    getattr(keras.optimizers, name).update_step
    for name in ("Ftrl", "ScheduleFreeAdamW")
    if hasattr(keras.optimizers, name)
)

_METHODS_OF_AN_UPDATE = (
    "_apply_weight_decay _backend_update_step _distributed_tf_update_step _get_current_learning_rate _use_weight_decay "
    "assign assign_add assign_sub learning_rate update_step"
).split()


def is_of_keras(optimizer: Any) -> bool:
    """Whether the methods of an update are Keras' own, so that it may be computed in parts."""
    kinds = type(optimizer).__mro__
    keras_class = next(kind for kind in kinds if kind.__module__.startswith("keras."))
    return all(getattr(kinds[0], name) is getattr(keras_class, name) for name in _METHODS_OF_AN_UPDATE)


def is_of_each_variable(optimizer: Any) -> bool:
    """Whether an update is Keras' own, and that of a variable uses its own slots alone."""
    return type(optimizer).update_step in _UPDATES and is_of_keras(optimizer)


def is_of_each_value(optimizer: Any) -> bool:
    """Whether an update is Keras' own, and that of a value uses its own slots alone, so that a part can be updated."""
    update = type(optimizer).update_step
    return (update in _UPDATES or update in _OTHER_UPDATES_OF_VALUES) and is_of_keras(optimizer)


def is_equal_on_replicas(optimizer: Any) -> bool:
    """Whether an update is Keras' own code, which differs between replicas in their copies of variables alone."""
    rate = optimizer._learning_rate
    return is_of_each_variable(optimizer) and (
        isinstance(rate, keras.Variable) or type(rate).__module__.startswith("keras.")
    )


def settings(optimizer: Any) -> tuple[Any, ...]:
    """The attributes of an optimizer on which the operations of its update depend, besides its variables."""
    plain = bool | int | float | str | None
    return tuple(pair for pair in sorted(vars(optimizer).items()) if isinstance(pair[1], plain))


def overridden_update(optimizer: Any) -> str | None:
    """Returns the method of an optimizer's class, if any, that updates in another way, as MultiOptimizer does."""
    names = ("apply", "apply_gradients", "_backend_apply_gradients", "_clip_gradients")
    return next((name for name in names if getattr(type(optimizer), name) is not getattr(TFOptimizer, name)), None)


def has_own_update_step(optimizer: Any) -> bool:
    """Whether the class of an optimizer changes state once in the update of all variables, as Nadam does."""
    return type(optimizer)._backend_update_step is not TFOptimizer._backend_update_step


def has_own_weight_decay(optimizer: Any) -> bool:
    """Whether the class of an optimizer decays weights itself, by assigning Keras' variables, as Muon does."""
    return type(optimizer)._apply_weight_decay is not TFOptimizer._apply_weight_decay


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
    """Returns the variables of which an optimizer keeps moving averages, if it does, also those without a gradient."""
    return list(optimizer._trainable_variables) if optimizer.use_ema else []


def averages_of(optimizer: Any, variables: Sequence[Any]) -> list[tuple[tf.Variable, tf.Variable]]:
    """Returns the holders of each variable and of its moving average, if it has one; scales of float8 have none."""
    averages = optimizer._model_variables_moving_average
    pairs = [(variable, averages[optimizer._get_variable_index(variable)]) for variable in variables]
    return [(held_variable(variable), held_variable(average)) for variable, average in pairs if average is not None]


def moved_average(optimizer: Any, average: Any, value: Any) -> tf.Tensor:
    """Returns the next moving average of a weight, or of a part of it, by Keras' formula."""
    momentum = tf.cast(tf.not_equal(optimizer.iterations, 0), value.dtype) * optimizer.ema_momentum
    return momentum * average + (1 - momentum) * value


def is_time_of_averages(optimizer: Any) -> tf.Tensor:
    """Whether the present update replaces the weights by their averages; it has an `ema_overwrite_frequency`."""
    return tf.equal((optimizer.iterations + 1) % optimizer.ema_overwrite_frequency, 0)


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
