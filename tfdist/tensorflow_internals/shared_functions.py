"""Calls a function that is traced for the first replica of a process from the graphs of the other replicas, too."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.merge_calls import needs_merge_call
from tfdist.tensorflow_internals.tensorflow_symbols import FuncGraph, may_be_recorded
from tfdist.tensorflow_internals.xla_functions import is_compiling

private(
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction._call_flat",
    "calls a function with other variables than those for which it was traced",
)
private("tensorflow.python.framework.func_graph:FuncGraph.outer_graph", "the graph of the step around a branch")
private("tensorflow.python.framework.ops:Operation._set_device", "the device of an operation that was created")

_FUNCTIONS = "_tfdist_shared_functions"


class _OtherDeviceError(Exception):
    """Raised while a function is traced that computes on another device than the replica's."""


class _Traced(NamedTuple):
    """A function, and the distributed variables whose handles it captures, in the order of its captures."""

    function: Any
    variables: list[Any]
    held: Any  # what the key identifies by id, so that the ids are not used again


def call_shared(
    function: Callable[..., None], tensors: Any, variables: Sequence[Any], key: Hashable, held: Any = None
) -> bool:
    """Calls `function(tensors)` of a replica through a function that the local replicas share.

    Python traces the update of every replica, and the graphs are equal but for the variables. TensorFlow inlines the
    function before it optimizes the graph, so what is computed, and where, stays.

    Args:
        function: Assigns to variables of this replica, and returns nothing. Python code that does the same on every
            replica of a process, apart from the replica's own copies of `variables`.
        tensors: Its argument, a structure of tensors.
        variables: The distributed variables that it may use.
        key: Equal for calls of equal functions, besides `variables`.
        held: Objects that `key` identifies by their `id`.

    Returns:
        Whether it was called. It was not outside of a function, with one local replica, where replicas reduce in merge
        calls, for XLA, while a gradient tape records, or if it captures other tensors than handles of `variables` or
        computes on other devices than the replica's.
    """
    graph = tf.compat.v1.get_default_graph()
    context, strategy = tf.distribute.get_replica_context(), tf.distribute.get_strategy()
    replicas = len(strategy.extended.worker_devices) if tf.distribute.has_strategy() else 1
    flat = tf.nest.flatten(tensors, expand_composites=True)
    if context is None or replicas == 1 or not isinstance(graph, FuncGraph) or is_compiling():
        return False
    if may_be_recorded() or needs_merge_call() or not all(map(tf.is_tensor, flat)):
        return False
    specs = tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in flat)
    while isinstance(graph.outer_graph, FuncGraph):  # each replica has its own graph of a branch
        graph = graph.outer_graph
    full_key = key, tuple(map(id, variables)), specs
    functions: dict[Hashable, _Traced | None] = getattr(graph, _FUNCTIONS, {})
    setattr(graph, _FUNCTIONS, functions)  # so that they are deleted with the graph, which each of them refers to
    if full_key not in functions:
        functions[full_key] = _trace(function, tensors, specs, variables, held)
    traced = functions[full_key]
    if traced is None:
        return False
    traced.function._call_flat(flat, [variable.handle for variable in traced.variables])
    return True


def _trace(function: Callable[..., None], tensors: Any, specs: Any, variables: Sequence[Any], held: Any) -> Any:
    def traced(*arguments: tf.Tensor) -> None:
        function(tf.nest.pack_sequence_as(tensors, list(arguments), expand_composites=True))
        operations = tf.compat.v1.get_default_graph().get_operations()
        if {operation.device for operation in operations} - {"", device}:
            raise _OtherDeviceError
        for operation in operations:
            operation._set_device("")  # that of the caller; its variables are on it

    device = tf.no_op().device
    by_handle = {id(variable.handle): variable for variable in variables}
    try:
        concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)
    except Exception:  # the call without sharing will raise it, too, if it is not about sharing
        return None
    captured = [by_handle.get(id(handle)) for handle in concrete.captured_inputs]
    if any(captured_variable is None for captured_variable in captured):
        return None
    return _Traced(concrete, captured, (list(variables), held))
