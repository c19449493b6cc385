"""Operations that automatic control dependencies leave unordered, and a clock of such operations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


def read_clock(ready: Sequence[Any], host: str) -> tf.Tensor:
    """Returns the time, in nanoseconds, when all of `ready` is computed, an int64 scalar.

    Args:
        ready: Tensors, with an earlier reading if there is one, or `tf.IndexedSlices`.
        host: The CPU device of a worker.
    """
    with tf.control_dependencies(_values(ready)), tf.device(host):
        seconds = _seconds()
        # Later operations, including other replicas' collectives, would wait for it.
        leave_unordered(seconds)
        return tf.cast(seconds * 1e9, tf.int64)  # to 256 ns


def after_clocks(readings: Sequence[tf.Tensor], tensors: Sequence[Any]) -> list[Any]:
    """Returns `tensors`, dense or `tf.IndexedSlices`, such that what uses them waits for all `readings`."""
    with tf.control_dependencies(readings):
        return [
            tf.IndexedSlices(tf.identity(one.values), one.indices, one.dense_shape)
            if isinstance(one, tf.IndexedSlices)
            else tf.identity(one)
            for one in tensors
        ]


def _values(tensors: Sequence[Any]) -> list[tf.Tensor]:
    return [one.values if isinstance(one, tf.IndexedSlices) else one for one in tensors]


def _seconds() -> tf.Tensor:
    return tf.timestamp()
