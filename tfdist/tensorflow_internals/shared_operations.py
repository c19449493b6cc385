"""Creates equal operations of a graph once, and calls a function traced for one replica from the others."""

import contextvars
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.tensorflow_internals.merge_calls import needs_merge_call
from tfdist.tensorflow_internals.tensorflow_symbols import FuncGraph, may_be_recorded
from tfdist.tensorflow_internals.xla_functions import is_compiling
from tfdist.utils.temporary_values import setting

_READ = "ReadVariableOp"
# Their results depend on their inputs alone.
_SHARED = frozenset(
    "Const ReadVariableOp Cast Pow Sqrt Rsqrt Square Neg Sub Mul RealDiv AddV2 Maximum Minimum FloorMod FloorDiv Shape "
    "ShapeN Reshape StridedSlice Prod BroadcastGradientArgs".split()
)
_LARGEST_CONSTANT_BYTES = 256

_current: contextvars.ContextVar["_Shared | None"] = contextvars.ContextVar("tfdist_shared_operations", default=None)
_free: contextvars.ContextVar[Any] = contextvars.ContextVar("tfdist_free_constants", default=None)
_active: "list[_Shared]" = []
_FUNCTIONS = "_tfdist_shared_functions"


@contextmanager
def shared_operations() -> Iterator[None]:
    """Within this context, what is equal to an operation that was created in it is not created again.

    Applies to the graph of the function that is being traced: to constants, reads of a variable that has not changed
    since, and simple functions of these. TensorFlow merges them itself before a function runs, but only after it has
    created and analysed all. Adam, for instance, creates 25 operations for each variable that depend on the step alone.

    Call no function of a user in this context that tells a constant from an equal one. Nothing is shared while a
    gradient tape records, which does. Constants do not wait for the operations of `tf.control_dependencies`.
    """
    graph, outer = tf.compat.v1.get_default_graph(), _current.get()
    if not isinstance(graph, FuncGraph) or (outer is not None and outer.graph is graph):
        yield
        return
    patch_graphs()
    shared = _Shared(graph)
    _active.append(shared)
    try:
        with setting(_current, shared):
            yield
    finally:
        _active.remove(shared)


@contextmanager
def step_after(tensors: Sequence[tf.Tensor]) -> Iterator[None]:
    """Like `tf.control_dependencies(tensors)`, except that constants of this graph do not wait.

    Thousands of constants with control inputs make each pass of TensorFlow over the graph slower.
    """
    patch_graphs()
    with setting(_free, tf.compat.v1.get_default_graph()), tf.control_dependencies(tensors):
        yield


class _Shared:
    """The operations of one context, with their inputs, so that the ids of these are not used again."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._created: dict[Any, tuple[tf.Operation, Sequence[Any]]] = {}
        self._reads: dict[str, list[Any]] = {}  # by the name of the variable's handle

    def create(
        self, create: Callable[[], tf.Operation], kind: str, inputs: Sequence[Any], name: str, attrs: Any
    ) -> tf.Operation:
        """Returns an operation of the type `kind`, which `create` creates if there is no equal one."""
        key = self._key(kind, inputs, name, attrs)
        if key in self._created:
            return self._created[key][0]
        operation = _without_waiting(self.graph, create) if kind == "Const" else create()
        if key is not None:
            self._created[key] = operation, tuple(inputs)
            if kind == _READ:
                self._reads.setdefault(operation.inputs[0].name, []).append(key)
        return operation

    def _key(self, kind: str, inputs: Sequence[Any], name: str, attrs: Any) -> Any:
        """What equal operations have in common; `None` if one is not shared."""
        if kind not in _SHARED or attrs is None or may_be_recorded():
            return None
        if kind == "Const" and attrs["value"].tensor.ByteSize() > _LARGEST_CONSTANT_BYTES:
            return None
        # The degree of a constant depends on its name; see `sample_degrees.py`.
        own_name = name.rstrip("/").rpartition("/")[2].rstrip("_0123456789") if kind == "Const" else ""
        own_attrs = tuple(sorted((key, value.SerializeToString()) for key, value in (attrs or {}).items()))
        graph, waits = self.graph, kind == _READ  # for operations after which a variable has another value
        place = (*graph._device_functions_outer_to_inner, *map(id, graph._colocation_stack.peek_objs()))
        waits_for = frozenset(map(id, graph._current_control_dependencies())) if waits else None
        return kind, own_name, own_attrs, place, waits_for, tuple(map(id, inputs))

    def forget_reads(self, handles: Sequence[tf.Tensor]) -> None:
        """Forgets what was read of variables that another operation may have changed."""
        for handle in handles:
            for key in self._reads.pop(handle.name, ()):
                del self._created[key]


def _without_waiting(graph: Any, create: Callable[[], tf.Operation]) -> tf.Operation:
    with graph.control_dependencies(None):
        return create()


@patch
def patch_graphs() -> None:
    """Makes the graphs of functions ask the context of the thread, which is that of a replica.

    After a merge call another thread may change variables of a replica, so writes count in all contexts.
    """
    create = FuncGraph._create_op_internal

    @replace(FuncGraph, "_create_op_internal")
    def create_or_share(self: Any, op_type: str, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> tf.Operation:
        new = functools.partial(create, self, op_type, inputs, *args, **kwargs)
        if op_type == "Const" and _free.get() is self:
            new = functools.partial(_without_waiting, self, new)
        if not _active:
            return new()
        shared = _current.get()
        if shared is None or shared.graph is not self:
            operation = new()
        else:
            operation = shared.create(new, op_type, inputs, kwargs.get("name") or op_type, kwargs.get("attrs"))
        if op_type != _READ and any(getattr(tensor, "dtype", None) == tf.resource for tensor in inputs):
            handles = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
            for active in _active:
                if active.graph is self:
                    active.forget_reads(handles)
        return operation


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
