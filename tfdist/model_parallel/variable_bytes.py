"""How many bytes of variables each device holds."""

import math
from collections import defaultdict
from typing import Any

from tfdist.keras_internals.placed_variables import compiled_optimizer, held_variable


def variable_bytes_by_device(model: Any) -> dict[str, int]:
    """Returns by the full name of a device the bytes of weights and of the optimizer's variables on it.

    Args:
        model: A Keras model. Its copies in other columns, and the parts of split variables, count where they are.
    """
    optimizer = compiled_optimizer(model)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    found: dict[str, int] = defaultdict(int)
    for variable in {id(one): one for one in variables}.values():
        held = held_variable(variable)
        for one in getattr(held, "shards", None) or (held, *getattr(held, "copies", ())):
            found[one.device] += math.prod(one.shape) * one.dtype.size
    return dict(found)
