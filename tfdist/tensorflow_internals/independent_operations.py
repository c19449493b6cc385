"""Operations that automatic control dependencies leave unordered."""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfdist.private_symbols import private

private(
    "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies.run_independently",
    "a function orders all its stateful operations one after another, also those of different stages",
)


def leave_unordered(tensor: tf.Tensor) -> None:
    """Lets the operation of a tensor wait only for its inputs and control dependencies. Eagerly nothing happens."""
    manager = None if tf.executing_eagerly() else getattr(tensor.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(tensor.op)


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
