"""Rejects models and optimizers that cannot be trained with split variables."""

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.keras_internals.placed_variables import optimizers_of
from tfdist.keras_internals.whole_values import GATHERING

_OPTIMIZERS = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adamax),
    *(keras.optimizers.Nadam, keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta),
    *(keras.optimizers.Ftrl, keras.optimizers.Lion, keras.optimizers.Lamb),
    *GATHERING,
)
_REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def check_split_variables(model: Any, axes: Mapping[int, int], step: str) -> None:
    """Raises an error if a step would compute something else on parts of variables than on complete ones.

    Args:
        model: The Keras model.
        axes: By the id of a split variable its axis.
        step: "train_step", "test_step" or "predict_step".

    Raises:
        ValueError: The message gives the reason and the remedy.
    """
    if step != "train_step" or not axes:
        return
    optimizer, _ = optimizers_of(model.optimizer)
    if type(optimizer) not in _OPTIMIZERS:
        name = type(optimizer).__name__
        raise ValueError(
            "An optimizer cannot update split variables, because its update of an element may depend on the complete "
            f"variable. Received: {name} with a layout map; what it needs is not known. "
            f"Expected: one of {', '.join(one.__name__ for one in _OPTIMIZERS)}. Use one of them, or leave out "
            "`layout_map`."
        )
    for variable in model.trainable_variables:
        if id(variable) not in axes:
            continue
        regularizer, constraint = getattr(variable, "regularizer", None), getattr(variable, "constraint", None)
        is_elementwise = constraint is None or type(constraint) is keras.constraints.NonNeg
        if not is_elementwise or not (regularizer is None or type(regularizer) in _REGULARIZERS):
            found = regularizer if is_elementwise else constraint
            raise ValueError(
                "A split variable has a regularizer or constraint that needs all of it. Received: "
                f"{type(found).__name__} of {variable.path!r}. Expected: the regularizers L1, L2 and L1L2 and the "
                "constraint NonNeg. Exclude this path from the layout map, or replace them."
            )
