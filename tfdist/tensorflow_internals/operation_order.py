"""The order in which a `tf.function` runs operations: of several replicas, of independent calls, and of the clock."""

import contextvars
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.function_graphs import BranchGraph, count_writes
from tfdist.utils.temporary_values import setting

_is_ordered = private(
    "tensorflow.python.framework.auto_control_deps:op_is_stateful", "tells which operations a function orders"
)
resources_of = private(
    "tensorflow.python.framework.auto_control_deps:_get_resource_inputs", "tells which operations use a resource"
)

_LEFT_UNORDERED = "_independent_side_effects"
_autograph_status = private(
    "tensorflow.python.autograph.core.ag_ctx:control_status_ctx", "whether AutoGraph converts what is being traced"
)
_with_autograph = private(
    "tensorflow.python.autograph.impl.api:tf_convert", "lets AutoGraph convert a function that replicas call"
)
_LOOPS = tuple(
    private(f"tensorflow.python.ops.control_flow_v2_func_graphs:{name}", "is the graph of a loop, where no sum may be")
    for name in ("WhileBodyFuncGraph", "WhileCondFuncGraph")
)
_is_deterministic = private(
    "tensorflow.python.framework.config:is_op_determinism_enabled", "tells whether the clock must not be TensorFlow's"
)
_BETWEEN_REPLICAS = -1
_graph_of_replicas: contextvars.ContextVar[Any] = contextvars.ContextVar("tfdist_graph_of_replicas", default=None)


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
    if not _is_ordered(operation) or any(True for _ in resources_of(operation)):
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


def reject_loop_in_replica() -> None:
    """Raises an error where a replica, one of several in this process, would reduce in a separate loop.

    TensorFlow tells apart the collectives of different loops by the names of the loops, which differ between replicas:
    they would wait for each other forever.
    """
    graph, outermost = tf.compat.v1.get_default_graph(), _graph_of_replicas.get()
    while outermost is not None and graph is not None and graph is not outermost:
        if isinstance(graph, _LOOPS):
            raise ValueError(
                "Replicas cannot reduce or update in a loop of the graph where a process has several devices. "
                "Received: an `all_reduce`, `apply_gradients`, update of metrics or layer with weights in parts, in "
                "a `tf.while_loop`, or in a `for` or `while` over tensors, within the function given to "
                "`strategy.run`. Expected: the loop around "
                "`strategy.run`, a Python `range`, or one device for each process, as `tfdist run --workers N` starts."
            )
        graph = getattr(graph, "outer_graph", None)


@contextmanager
def outside_of_conditions(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Adds operations that read some variables to the graph around branches of conditions.

    Replicas that choose different branches would exchange different values. A branch that may have written to the
    variables reads them itself.
    """
    with ExitStack() as stack:
        while isinstance(graph := tf.compat.v1.get_default_graph(), BranchGraph):
            if graph is _graph_of_replicas.get() or count_writes(variables):
                break
            stack.enter_context(graph.outer_graph.as_default())
        yield


class OrdersReplicas:
    """A `StrategyExtended` whose replicas have each a separate order; see `call_in_order_of_replica`."""

    def _call_for_each_replica(self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        call = super()._call_for_each_replica  # type: ignore[misc]
        if len(self.worker_devices) == 1:
            return call(fn, args, kwargs)
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            is_compiled_alone = fn._jit_compile and "GPU" in self.worker_devices[0]  # for each replica, by TensorFlow
            return call(fn, args, kwargs) if is_compiled_alone else self._function_of_replicas(fn)(*args, **kwargs)
        return call_in_order_of_replica(lambda function: call(function, args, kwargs), fn)

    def _function_of_replicas(self: Any, fn: Any) -> Any:
        """Returns a `tf.function` like `fn` that calls all replicas, as TensorFlow's `call_for_each_replica` does."""
        functions = self.__dict__.setdefault("_functions_of_replicas", WeakKeyDictionary())
        if fn not in functions:
            on_replica = fn.python_function

            def of_replicas(*args: Any, **kwargs: Any) -> Any:
                converted = _with_autograph(on_replica, _autograph_status())  # as this function is
                return self._call_for_each_replica(converted, args, kwargs)

            functions[fn] = fn._clone(python_function=of_replicas)
        return functions[fn]


def call_in_order_of_replica(call_replicas: Callable[[Callable[..., Any]], Any], function: Any) -> Any:
    """Returns `call_replicas(function)`; in a graph each replica's operations have a separate order.

    A `tf.function` runs assertions, prints and Python functions in the order in which they were added to the graph. A
    replica that reduces is traced to its end before the next one. So what it does with a sum would come before what the
    next replica does to compute its part of this sum, and the two would wait for each other. Here a replica's
    operations follow each other. They come after what stood in the graph before the replicas, those of a merge call
    come after all that replicas did before it, and what is added to the graph afterwards comes after all of them.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or getattr(graph, "experimental_acd_manager", None) is None:
        return call_replicas(function)
    tracing = _Tracing(graph)

    def call(*args: Any, **kwargs: Any) -> Any:
        with tracing.next_replica():
            return function(*args, **kwargs)

    result = call_replicas(call)
    tracing.order()
    return result


class _Tracing:
    """Which replica has added which operations to a graph."""

    def __init__(self, graph: tf.Graph) -> None:
        self.graph, self._replicas = graph, 0
        # Ascending numbers of operations, and the replica that adds those from there on.
        self._turns = [(len(graph.get_operations()), _BETWEEN_REPLICAS)]

    @contextmanager
    def next_replica(self) -> Iterator[None]:
        """Is the part of a replica, which merge calls interrupt."""
        number, context = self._replicas, tf.distribute.get_replica_context()
        self._replicas += 1
        merge_call = context.merge_call

        def merge(*args: Any, **kwargs: Any) -> Any:
            self.take_turn(_BETWEEN_REPLICAS)
            merged = merge_call(*args, **kwargs)
            self.take_turn(number)
            return merged

        context.merge_call = merge  # this object is of this thread and call
        self.take_turn(number)
        try:
            with setting(_graph_of_replicas, self.graph):
                yield
        finally:
            del context.merge_call
            self.take_turn(_BETWEEN_REPLICAS)

    def take_turn(self, replica: int) -> None:
        self._turns.append((len(self.graph.get_operations()), replica))

    def order(self) -> None:
        """Orders the operations of all replicas but the first, which keep the function's order."""
        operations = self.graph.get_operations()
        before = next(filter(is_in_common_order, reversed(operations[: self._turns[0][0]])), None)
        last = dict.fromkeys(range(1, self._replicas), before)
        ends = [*(start for start, _ in self._turns[1:]), len(operations)]
        for (start, replica), end in zip(self._turns, ends, strict=True):
            for operation in filter(is_in_common_order, operations[start:end]):
                if replica in last:
                    leave_unordered(operation)
                    _run_after(operation, [last[replica]])
                    last[replica] = operation
                elif replica == _BETWEEN_REPLICAS:
                    _run_after(operation, last.values())
                    last = dict.fromkeys(last, operation)
        independent = [operation for operation in last.values() if operation and not is_in_common_order(operation)]
        if independent:
            with tf.control_dependencies(None), tf.device("CPU:0"):
                after = tf.raw_ops.Assert(condition=True, data=["the replicas' operations have run"])
            _run_after(after, independent)


def _run_after(operation: Any, earlier: Any) -> None:
    operation._add_control_inputs(
        [earlier_operation for earlier_operation in dict.fromkeys(earlier) if earlier_operation is not None]
    )


def seconds_since_1970() -> tf.Tensor:
    """Returns the time when this operation runs, a float64 scalar; also with `enable_op_determinism`."""
    if not _is_deterministic():
        return tf.timestamp()
    # TensorFlow refuses to run its own clock then. This one takes longer, as it needs Python's lock.
    seconds = tf.numpy_function(time.time, [], tf.float64)
    seconds.set_shape(())
    return seconds


def read_clock(ready: Sequence[Any], host: str) -> tf.Tensor:
    """Returns the time, in nanoseconds, when all of `ready` is computed, an int64 scalar on `host`.

    TensorFlow executes what is ready in any order. So it may read a clock that waits for some tensors long after these
    are there, and first compute what uses them: once it has learned how long operations take, it does so in each step,
    if it has one thread. Nothing is timed unless it waits for the clock (`after_clocks`).

    `ready` are tensors, with an earlier reading if there is one, or `tf.IndexedSlices`.
    """
    with tf.control_dependencies(_values(ready)), tf.device(host):
        seconds = seconds_since_1970()
        # Later operations, including other replicas' collectives, would wait for it.
        leave_unordered(seconds)
        return tf.cast(seconds * 1e9, tf.int64)  # to 256 ns


def after_clocks(readings: Sequence[tf.Tensor], tensors: Sequence[Any]) -> list[Any]:
    """Returns `tensors`, dense or `tf.IndexedSlices`, such that what uses them waits for all `readings`."""
    with tf.control_dependencies(readings):
        return [
            tf.IndexedSlices(tf.identity(tensor.values), tensor.indices, tensor.dense_shape)
            if isinstance(tensor, tf.IndexedSlices)
            else tf.identity(tensor)
            for tensor in tensors
        ]


def _values(tensors: Sequence[Any]) -> list[tf.Tensor]:
    return [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
