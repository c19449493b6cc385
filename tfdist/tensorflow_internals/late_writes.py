"""Lets what a function writes to variables wait for an operation that its graph gets at the end."""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.function_graphs import called_graph
from tfdist.tensorflow_internals.operation_order import is_in_common_order, resources_of

_CHECKS = "tfdist_checks_before_writes"  # a collection of a graph


def check_before_writes(check: Any) -> None:
    """Lets writes that wait in its graph wait for a check, too: it fails if what it belongs to has failed.

    `check` is an operation, or `None` where it has been checked eagerly.
    """
    if check is not None:
        check.graph.add_to_collection(_CHECKS, check)


def write_after(
    handles: Collection[Any], earlier: Collection[Any], add: Callable[[Sequence[tf.Operation]], tf.Operation]
) -> set[int]:
    """Lets writes to variables wait for an operation, which itself waits for all that uses some other resources.

    It also waits for the checks of the graph, and for its collectives: those of several devices wait for each other
    without an edge between them.

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
    first = [check for check in graph.get_collection(_CHECKS) if check.graph is graph]
    uses = {operation: list(resources_of(operation)) for operation in graph.get_operations()}
    writes, predecessors = collections.defaultdict(list), _order(uses)
    for operation, used in uses.items():
        if _is_collective(operation) or any(id(tensor) in others for tensor in operation.inputs):
            first.append(operation)
        for tensor, kind in used:
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


def _order(uses: Mapping[Any, Sequence[tuple[Any, Any]]]) -> dict[Any, list[tf.Operation]]:
    """Returns the operations after which a function runs each one although none of its inputs says so.

    `uses` has them in the order in which they were added, with the resources that each one uses.

    It orders them when its graph is complete: those that use a resource around those that write to it, and all other
    stateful ones, as they were added.
    """
    predecessors: dict[Any, list[Any]] = collections.defaultdict(list)
    last_write: dict[int, Any] = {}
    reads: dict[int, list[Any]] = collections.defaultdict(list)
    last_of_others = None
    for operation, used in uses.items():
        for tensor, kind in used:
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


def _is_collective(operation: tf.Operation) -> bool:
    """Whether an operation, or a function that it calls, waits for other devices."""
    attributes = operation.node_def.attr.values()
    called = [attribute.func for attribute in attributes if attribute.HasField("func")]
    called += [branch for attribute in attributes for branch in attribute.list.func]  # of `tf.switch_case`
    graphs = [called_graph(operation.graph, function.name) for function in called]
    return operation.type.startswith("Collective") or any(
        _is_collective(inner) for graph in graphs if graph is not None for inner in graph.get_operations()
    )


def _writes(kind: Any) -> bool:
    return kind.value == "read-write"
