"""Which optimizers update variables by Keras' own code, and on what the operations of such an update depend."""

from typing import Any

import keras

# Updates of a variable that use its own slots alone, so that the order of the variables does not matter.
_UPDATES = tuple(
    getattr(keras.optimizers, name).update_step
    for name in "Adadelta Adagrad Adam Adamax AdamW Lion RMSprop SGD".split()
)

# Those of values, too, which XLA does not compile.
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
    own = next(kind for kind in kinds if kind.__module__.startswith("keras."))
    return all(getattr(kinds[0], name) is getattr(own, name) for name in _METHODS_OF_AN_UPDATE)


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
