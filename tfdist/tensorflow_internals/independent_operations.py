"""Operations that automatic control dependencies leave unordered."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private

private(
    "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies.run_independently",
    "a function orders all its stateful operations one after another, also those of different stages and replicas",
)
_is_ordered = private(
    "tensorflow.python.framework.auto_control_deps:op_is_stateful", "tells which operations a function orders"
)
_resources_of = private(
    "tensorflow.python.framework.auto_control_deps:_get_resource_inputs", "tells which operations use a resource"
)

_LEFT_UNORDERED = "_independent_side_effects"


def leave_unordered(operation: Any) -> None:
    """Lets an operation, or that of a tensor, wait only for its inputs and control dependencies.

    An assertion on what other replicas have sent would otherwise hold up all that a function does afterwards. Eagerly,
    where an assertion returns `None`, nothing happens.
    """
    if tf.executing_eagerly() or operation is None:
        return
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(getattr(operation, "op", operation))


def is_in_common_order(operation: Any) -> bool:
    """Whether a function runs it after all other such operations: not those that use a resource, which have its order.

    A dataset that is reduced uses the variables of the functions that it maps, though no input is a resource.
    """
    if not _is_ordered(operation) or any(True for _ in _resources_of(operation)):
        return False
    return _LEFT_UNORDERED not in operation.node_def.attr


@contextmanager
def independent_calls() -> Iterator[None]:
    """Leaves function calls that the body adds to the graph unordered, unless their inputs contain a resource.

    A `tf.function` runs stateful operations in the order in which they were added. The call of a function with random
    numbers, an assertion or a loop counts as stateful, so stages that compute different micro-batches would wait for
    each other. The body orders its calls by explicit control dependencies.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is None:
        return
    for operation in graph.get_operations()[before:]:
        if operation.type == "StatefulPartitionedCall" and is_in_common_order(operation):
            manager.run_independently(operation)
