"""Divides a part of a traced function, so that devices compute gradients of weights while they exchange others."""

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.column_program import part_of

# Without one of these a remainder takes no longer than the call of a function.
_COSTLY = frozenset(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "UnsortedSegmentSum"))


def urgent_first(graph: Any, definition: Any, part: Any, sent: str) -> list[Any]:
    """Returns what a sent tensor needs as one function, and the rest of a part as another one.

    Args:
        graph: The graph of the traced function.
        definition: Its `tf.compat.v1.GraphDef`.
        part: One of its parts, before an exchange; or None.
        sent: The name of the tensor that the exchange sends.

    Returns:
        The functions in the order of their calls; the part alone if there is no costly rest.
    """
    if part is None or sent not in part.outputs:
        return [part]
    inner = part.operations
    own = [one for one in graph.get_operations() if one.name in inner]
    given = set(part.inputs)
    depends: set[str] = set()
    for one in own:  # the others depend on constants alone
        if any(tensor.name in given or tensor.op.name in depends for tensor in one.inputs):
            depends.add(one.name)
    first = _needed([graph.get_tensor_by_name(sent).op], inner, given)
    rest = [one for one in own if one.name in depends and one.name not in first]
    if not any(one.type in _COSTLY for one in rest):
        return [part]
    later = {one.name for one in rest}
    constants = _needed(
        [tensor.op for one in rest for tensor in one.inputs if tensor.op.name not in depends], inner, given
    )
    kept = [one for one in own if one.name not in later]  # also what nothing needs, such as prints
    passed = {tensor.name for one in rest for tensor in one.inputs if tensor.op.name in depends - later}
    wanted = {*part.outputs, *passed}
    return [
        part_of(definition, {one.name for one in kept}, _inputs(kept, given), _results(kept, wanted)),
        part_of(definition, later | constants, _inputs(rest, given | passed), _results(rest, wanted)),
    ]


def _needed(operations: Sequence[Any], inner: Collection[str], given: Collection[str]) -> set[str]:
    """Returns the names of `operations`, and of those in `inner` whose data they need."""
    found, waiting = set(), list(operations)
    while waiting:
        one = waiting.pop()
        if one.name in inner and one.name not in found:
            found.add(one.name)
            waiting += [tensor.op for tensor in one.inputs if tensor.name not in given]
    return found


def _inputs(operations: Sequence[Any], given: Collection[str]) -> list[tf.Tensor]:
    return list({one.name: one for operation in operations for one in operation.inputs if one.name in given}.values())


def _results(operations: Sequence[Any], wanted: Collection[str]) -> list[tf.Tensor]:
    return [tensor for operation in operations for tensor in operation.outputs if tensor.name in wanted]
