"""Operations that automatic control dependencies leave unordered."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from tfdist.private_symbols import private

private(
    "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies.run_independently",
    "a function orders all its stateful operations one after another, also those of different stages and replicas",
)
_is_ordered = private(
    "tensorflow.python.framework.auto_control_deps:op_is_stateful", "tells which operations a function orders"
)
private(
    "tensorflow.python.framework.ops:Operation._add_control_inputs",
    "orders the operations of a replica that its function leaves unordered",
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


def in_order_of_replica(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that replicas call one after another while a step is traced, each with a separate order.

    A `tf.function` runs assertions, prints and Python functions in the order in which they were added to the graph. A
    replica that reduces is traced to its end before the next one. So what it does with a sum would come before what the
    next replica does to compute its part of this sum, and the two would wait for each other. Here a replica's
    operations follow each other, and what stood in the graph before the first replica.
    """
    before_replicas: WeakKeyDictionary[tf.Graph, list[Any]] = WeakKeyDictionary()

    def call(*args: Any, **kwargs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        manager = getattr(graph, "experimental_acd_manager", None)
        if tf.executing_eagerly() or manager is None:
            return function(*args, **kwargs)
        if graph not in before_replicas:  # the first replica
            before_replicas[graph] = list(itertools.islice(filter(_is_in_common_order, _backwards(graph)), 1))
            return function(*args, **kwargs)
        before = len(graph.get_operations())
        result = function(*args, **kwargs)
        last = before_replicas[graph]
        for operation in filter(_is_in_common_order, graph.get_operations()[before:]):
            manager.run_independently(operation)
            operation._add_control_inputs(last)
            last = [operation]
        return result

    return call


def _backwards(graph: tf.Graph) -> Iterator[Any]:
    return reversed(graph.get_operations())


def _is_in_common_order(operation: Any) -> bool:
    """Whether a function runs it after all other such operations: not those of a resource, which have their own."""
    if not _is_ordered(operation) or any(given.dtype == tf.resource for given in operation.inputs):
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
        holds_resource = any(given.dtype == tf.resource for given in operation.inputs)
        if operation.type == "StatefulPartitionedCall" and not holds_resource:
            manager.run_independently(operation)
