"""What a replica owns of an optimizer's state: parts of variables, or whole ones, or nothing."""

from typing import Any

import keras

from tfdist.keras_internals.keras_updates import is_of_each_value

# tfdist does these itself, on parts, so that those of a subclass would have no effect.
_REPLACED = {
    "_backend_apply_gradients": "the order of an update",
    "_clip_gradients": "clipping, which needs the gradients of all variables",
    "_overwrite_model_variables_with_average_value": "the averages of weights",
    "_update_model_variables_moving_average": "the averages of weights",
    "add_variable_from_reference": "how slots are created",
}


def owns_whole_variables(optimizer: Any) -> bool | None:
    """Whether a replica has to own whole variables, because an update of a value may use others of the variable.

    Returns:
        `None` if the optimizer has no slots, because it leaves updates to other optimizers.

    Raises:
        ValueError: If its state cannot be split.
    """
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return None
    stock, cls = keras.optimizers.Optimizer, type(optimizer)  # both with what tfdist has put there
    own = next((name for name in _REPLACED if getattr(cls, name) is not getattr(stock, name)), None)
    if own is None:
        return not is_of_each_value(optimizer)
    raise ValueError(
        "`shard_optimizer_state=True` replaces a method that the optimizer's class defines. Received: "
        f"{type(optimizer).__name__}, which defines {own}: {_REPLACED[own]}. Expected: a class that defines "
        "`update_step`, `build` or `apply` alone. Create the strategy without `shard_optimizer_state`."
    )
