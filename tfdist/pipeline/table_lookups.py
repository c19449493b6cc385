"""Which tables a traced function looks up at the same rows in each call, as a table of positions."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.pruned_function import OF_SHAPES, needed_operations

_LOOKUPS = ("Gather", "GatherV2")
_SAME_ROWS = ("Cast", "Identity")


def tables_of_fixed_rows(traced: Any, tables: int, received: Iterable[str] = ()) -> set[int]:
    """Returns the positions of the tables whose rows do not depend on the values of the other arguments.

    Args:
        traced: A concrete function.
        tables: How many of its first arguments are tables.
        received: The names of further operations whose values may differ in each call.
    """
    own = traced.inputs[: len(traced.inputs) - len(traced.captured_inputs)]
    positions = {tensor.op.name: position for position, tensor in enumerate(own[:tables])}
    others = {*(tensor.op.name for tensor in own[tables:]), *received}
    is_fixed: dict[int, bool] = {}
    for operation in traced.graph.get_operations():
        if operation.type in _LOOKUPS and (name := _source(operation.inputs[0])) in positions:
            position = positions[name]
            depends = not others.isdisjoint(needed_operations(operation.inputs[1].op, OF_SHAPES))
            is_fixed[position] = is_fixed.get(position, True) and not depends
    return {position for position, fixed in is_fixed.items() if fixed}


def _source(tensor: tf.Tensor) -> str:
    operation = tensor.op
    while operation.type in _SAME_ROWS:
        operation = operation.inputs[0].op
    return str(operation.name)
