"""Lets what a function writes to variables wait for an operation that its graph gets at the end."""

import collections
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.operation_order import is_in_common_order, resources_of


def write_after(
    handles: Collection[Any], earlier: Collection[Any], add: Callable[[Sequence[tf.Operation]], tf.Operation]
) -> set[int]:
    """Lets writes to variables wait for an operation, which itself waits for all that uses some other resources.

    An operation that uses those resources may depend on a write. Then this write stays where it is.

    Args:
        handles: Handles of variables, as they are outside of the graph that is being traced.
        earlier: Handles of the other resources.
        add: Adds the operation, which runs after those that it gets, and returns it.

    Returns:
        The ids of those `handles` to which the graph writes without waiting.
    """
    graph = tf.compat.v1.get_default_graph()
    inner = {id(outer): captured for outer, captured in graph.captures}
    variables = {id(inner[id(handle)]): id(handle) for handle in handles if id(handle) in inner}
    others = {id(inner[id(handle)]) for handle in earlier if id(handle) in inner}
    first, writes, predecessors = [], collections.defaultdict(list), _order(graph.get_operations())
    for operation in graph.get_operations():
        if any(id(tensor) in others for tensor in operation.inputs):
            first.append(operation)
        for tensor, kind in resources_of(operation):
            if id(tensor) in variables and _writes(kind):
                writes[variables[id(tensor)]].append(operation)
    needed, waiting = set(), list(first)
    while waiting:
        operation = waiting.pop()
        if operation not in needed:
            needed.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
            waiting += [*operation.control_inputs, *predecessors[operation]]
    early = {handle for handle, writers in writes.items() if not needed.isdisjoint(writers)}
    added = add(first)
    for writer in {writer for handle, writers in writes.items() if handle not in early for writer in writers}:
        writer._add_control_inputs([added])
    return early


def _order(operations: Sequence[tf.Operation]) -> dict[Any, list[tf.Operation]]:
    """Returns the operations after which a function runs each one although none of its inputs says so.

    It orders them when its graph is complete: those that use a resource around those that write to it, and all other
    stateful ones, as they were added.
    """
    predecessors: dict[Any, list[Any]] = collections.defaultdict(list)
    last_write: dict[int, Any] = {}
    reads: dict[int, list[Any]] = collections.defaultdict(list)
    last_of_others = None
    for operation in operations:
        for tensor, kind in resources_of(operation):
            key = id(tensor)
            if key in last_write:
                predecessors[operation].append(last_write[key])
            if _writes(kind):
                predecessors[operation] += reads.pop(key, [])
                last_write[key] = operation
            else:
                reads[key].append(operation)
        if is_in_common_order(operation):
            if last_of_others is not None:
                predecessors[operation].append(last_of_others)
            last_of_others = operation
    return predecessors


def _writes(kind: Any) -> bool:
    return kind.value == "read-write"
