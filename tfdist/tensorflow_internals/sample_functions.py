"""Calls, conditions and loops: follows the samples into the functions that they run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.sample_axes import Rule, grows
from tfdist.tensorflow_internals.sample_kinds import ZERO, Kind, sum_of, unknown

_get_function = private(
    "tensorflow.python.framework.ops:Graph._get_function", "finds the graph that an operation calls"
)
_CONDITIONS = frozenset({"If", "StatelessIf"})
_LOOPS = frozenset({"While", "StatelessWhile"})
_PLAIN_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
CALLS = _PLAIN_CALLS | _CONDITIONS | _LOOPS
_MOST_TURNS = 4  # until the kinds of a loop's values do not change any more


def of_call(degrees: Any, tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """The kind of an output of a call, a condition or a loop. `degrees` is the `SampleDegrees` of its graph."""
    operation = tensor.op
    if operation.type in _LOOPS:
        return _of_loop(degrees, tensor, kinds)
    if operation.type in _PLAIN_CALLS:
        return _output(degrees, operation, "f", kinds, tensor.value_index)
    if not kinds[0].is_constant:
        return unknown(kinds, kinds[0].axes)
    branches = [
        _output(degrees, operation, name, kinds[1:], tensor.value_index) for name in ("then_branch", "else_branch")
    ]
    if branches[0].axes != branches[1].axes:
        return unknown(branches, branches[0].axes | branches[1].axes)
    return sum_of(branches, branches[0].axes)


def _of_loop(degrees: Any, tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """A loop's values have the kinds that one more turn does not change."""
    operation, state = tensor.op, list(kinds)
    for _ in range(_MOST_TURNS):
        condition = _output(degrees, operation, "cond", state, 0)
        if not (condition.is_fixed or condition.is_constant):
            return unknown(kinds, tensor.shape.rank and [0] or ())
        after = [_output(degrees, operation, "body", state, index) for index in range(len(state))]
        joined = [_joined(before, now) for before, now in zip(state, after, strict=True)]
        if joined == state:
            return state[tensor.value_index]
        state = joined
    return unknown(kinds, [0])


def _joined(before: Kind, after: Kind) -> Kind:
    if before == after:
        return before
    if before.degree == ZERO and not before.is_reduced and (not before.axes or before.axes == after.axes):
        return dataclasses.replace(after, is_trained=before.is_trained or after.is_trained, sizes=None)
    if before.axes != after.axes or before.is_reduced != after.is_reduced:
        return unknown([before, after], before.axes | after.axes)
    return sum_of([before, after], before.axes)


def _output(degrees: Any, operation: Any, name: str, kinds: Sequence[Kind], index: int) -> Kind:
    graph = _called_graph(operation.graph, operation.get_attr(name).name)
    if graph is None or len(graph.inputs) != len(kinds):
        return unknown(kinds, [0])
    result = degrees.nested(graph.inputs, kinds).kind(graph.outputs[index])
    return result if result.divisor is None else unknown(kinds)


def _called_graph(graph: Any, name: str) -> Any:
    while graph is not None:
        function = _get_function(graph, name)
        if function is not None:
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None


def _empty_list(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """A list counts as the tensor that stacks its elements."""
    is_of_samples = any(grows(kind.degree) for kind in kinds if kind.sizes is None)
    return Kind(frozenset({0}) if is_of_samples else frozenset(), ZERO)


def _list_of_rows(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return kinds[0]


def _with_element(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    element = kinds[-1].at(axis + 1 for axis in kinds[-1].axes)
    if 0 in kinds[0].axes or (kinds[0].axes and element.axes and kinds[0].axes != element.axes):
        return unknown(kinds, kinds[0].axes)
    return sum_of([kinds[0], element], kinds[0].axes | element.axes)


def _element(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """One sample's values in a loop over the samples are unknown, because the loop may add them up."""
    if 0 in kinds[0].axes:
        return unknown(kinds)
    return kinds[0].at(axis - 1 for axis in kinds[0].axes)


def _length(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return Kind(degree=1 if 0 in kinds[0].axes else 0)


RULES: dict[str, Rule] = {
    "TensorListReserve": _empty_list,
    "EmptyTensorList": _empty_list,
    "TensorListFromTensor": _list_of_rows,
    "TensorListStack": _list_of_rows,
    "TensorListSetItem": _with_element,
    "TensorListPushBack": _with_element,
    "TensorListGetItem": _element,
    "TensorListLength": _length,
}
