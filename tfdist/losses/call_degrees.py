"""Calls, conditions and loops: follows the samples into the functions that they run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.losses.sample_axes import Rule, grows
from tfdist.losses.sample_kinds import ZERO, Kind, sum_of, unknown
from tfdist.tensorflow_internals.function_graphs import CONDITIONS, LOOPS, PLAIN_CALLS, called_graph

CALLS = PLAIN_CALLS | CONDITIONS | LOOPS
_MOST_TURNS = 4  # After these, the kinds of a loop's values are unknown if they still change.


def of_call(degrees: Any, operation: tf.Operation, kinds: Sequence[Kind]) -> Callable[[tf.Tensor], Kind]:
    """Follows a call, a condition or a loop (`CALLS`); returns a function that returns the kind of an output."""
    if operation.type in LOOPS:
        return _of_loop(degrees, operation, kinds)
    if operation.type in PLAIN_CALLS:
        return _called(degrees, operation, "f", kinds)
    if not kinds[0].is_constant:
        return lambda output: unknown(kinds, kinds[0].axes)
    branches = [_called(degrees, operation, name, kinds[1:]) for name in ("then_branch", "else_branch")]

    def of_condition(output: tf.Tensor) -> Kind:
        either, other = (branch(output) for branch in branches)
        if either.axes != other.axes:
            return unknown([either, other], either.axes | other.axes)
        return sum_of([either, other], either.axes)

    return of_condition


def _of_loop(degrees: Any, operation: tf.Operation, kinds: Sequence[Kind]) -> Callable[[tf.Tensor], Kind]:
    """A loop's values have the kinds that one more turn does not change."""
    state = list(kinds)
    for _ in range(_MOST_TURNS):
        condition = _called(degrees, operation, "cond", state)(None)
        if not (condition.is_fixed or condition.is_constant):
            return lambda output: unknown(kinds, output.shape.rank and [0] or ())
        body = _called(degrees, operation, "body", state)
        joined = [_joined(before, body(output)) for before, output in zip(state, operation.outputs, strict=True)]
        if joined == state:
            return lambda output: state[output.value_index]
        state = joined
    return lambda output: unknown(kinds, [0])


def _joined(before: Kind, after: Kind) -> Kind:
    if before == after:
        return before
    if before.degree == ZERO and not before.is_reduced and (not before.axes or before.axes == after.axes):
        return dataclasses.replace(after, is_trained=before.is_trained or after.is_trained, sizes=None)
    if before.axes != after.axes or before.is_reduced != after.is_reduced:
        return unknown([before, after], before.axes | after.axes)
    return sum_of([before, after], before.axes)


def _called(degrees: Any, operation: tf.Operation, name: str, kinds: Sequence[Kind]) -> Callable[[Any], Kind]:
    """Follows the function in the attribute `name`; the result maps outputs to kinds, `None` to that of the first."""
    graph = called_graph(operation.graph, operation.get_attr(name).name)
    if graph is None or len(graph.inputs) != len(kinds):
        return lambda output: unknown(kinds, [0])
    within = degrees.nested(graph.inputs, kinds)

    def of_output(output: tf.Tensor | None) -> Kind:
        result = within.kind(graph.outputs[0 if output is None else output.value_index])
        return result if result.divisor is None else unknown(kinds)

    return of_output


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
