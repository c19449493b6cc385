"""The graphs of functions: where their operations come from, which others they run, their kernels, and their end."""

import contextlib
import functools
import gc
import inspect
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.tensorflow_symbols import FuncGraph, gradient_registry

_KERAS_FUNCTIONS = ("ops", "backend", "random", "utils")  # which programs call, too
_SymbolicTensor = private("tensorflow.python.framework.ops:SymbolicTensor", "a tensor of a graph")
_cancellation = private("tensorflow.python.eager:cancellation", "ends the call of a function before it runs")
_get_function = private(
    "tensorflow.python.framework.ops:Graph._get_function", "finds the graph that an operation calls"
)

_ControlFlowGraph, BranchGraph = (
    private(f"tensorflow.python.ops.control_flow_v2_func_graphs:{name}", "is the graph of a branch, or of a loop")
    for name in ("ControlFlowFuncGraph", "CondBranchFuncGraph")
)

CONDITIONS = frozenset({"If", "StatelessIf"})
LOOPS = frozenset({"While", "StatelessWhile"})
PLAIN_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_PREFIX = "CustomGradient-"  # of the names under which they are registered
_graphs_of: weakref.WeakKeyDictionary[Any, "weakref.WeakSet[Any]"] = weakref.WeakKeyDictionary()


@functools.cache
def _folder(library: str) -> str:
    spec = find_spec(library)
    return os.path.dirname(os.path.realpath(spec.origin)) + os.sep if spec and spec.origin else os.devnull


def user_line(tensor: tf.Tensor) -> str:
    """Returns the file, line and function of the user's statement that computed a tensor of a graph."""
    folders = tuple(map(_folder, ("tensorflow", "keras", "tfdist", "tfdist.strategies")))
    for frame in reversed(list(tensor.op.traceback)):
        path, line, function = tuple(frame)[:3]
        if not path.startswith("<") and not os.path.realpath(path).startswith(folders):
            return f"{path}:{line}, in {function}"
    return f"the operation {tensor.op.name!r}"


def is_of_keras(tensor: tf.Tensor) -> bool:
    """Whether a layer, a loss or another class of Keras has computed a tensor of a graph, and not the user's code."""
    keras = _folder("keras")
    functions = tuple(os.path.join(keras, "src", name, "") for name in _KERAS_FUNCTIONS)
    for frame in reversed(list(tensor.op.traceback)):
        path = os.path.realpath(tuple(frame)[0])
        if not path.startswith((_folder("tensorflow"), *functions)):
            return path.startswith(keras)
    return False


def describe(value: Any) -> str:
    """Returns where `value` was computed, as far as that is known."""
    return user_line(value) if hasattr(value, "op") else repr(value)


def is_symbolic(value: Any) -> bool:
    """Whether `value` is a dense tensor of a graph, whose origin can be followed."""
    return isinstance(value, tf.Tensor) and hasattr(value, "graph") and not hasattr(value, "numpy")


def called_graph(graph: Any, name: str) -> Any:
    """Returns the graph of the function `name` that an operation of `graph` calls, or `None`."""
    functions = (_get_function(around, name) for around in graphs_around(graph))
    return getattr(next((function for function in functions if function is not None), None), "graph", None)


def graphs_around(graph: Any) -> Iterator[Any]:
    """Yields a graph and those around it."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def is_of_trace(tensor: tf.Tensor) -> bool:
    """Whether a tensor is of the function that is being traced, not of one around it, which may end before."""
    for graph in graphs_around(tf.compat.v1.get_default_graph()):
        if graph is tensor.graph or not isinstance(graph, _ControlFlowGraph):
            return graph is tensor.graph
    return False


def count_writes(variables: Sequence[tf.Variable]) -> int:
    """Returns how many operations of the graph that is being traced may have written to some variables."""
    held = {id(variable.handle) for variable in variables}
    captures = getattr(tf.compat.v1.get_default_graph(), "captures", ())
    handles = [inner for outer, inner in captures if id(outer) in held]
    return sum(operation.type != "ReadVariableOp" for handle in handles for operation in handle.consumers())


def operations_behind(
    *operations: Any, inputs_of: Callable[[Any], Iterable[Any]] = lambda operation: operation.inputs
) -> Iterator[Any]:
    """Yields operations and those whose data they use, each once; `inputs_of` returns the tensors to follow."""
    waiting, seen = list(operations), set()
    while waiting:
        reached = waiting.pop()
        if reached not in seen:
            seen.add(reached)
            yield reached
            waiting += [tensor.op for tensor in inputs_of(reached)]


def captured_handles(ignored: str) -> set[int]:
    """Returns the ids of the tensors that the graphs of functions in this process have captured.

    Graphs whose names begin with `ignored` do not count, nor the graphs within them.
    """
    handles: set[int] = set()
    for graph in [candidate for candidate in gc.get_objects() if isinstance(candidate, FuncGraph)]:
        if not any(around.name.startswith(ignored) for around in graphs_around(graph) if isinstance(around, FuncGraph)):
            handles.update(map(id, graph.external_captures))
    return handles


def create_kernels(function: Any, argument_spec: Any) -> None:
    """Optimizes the graph of a concrete function and creates its kernels, which its first call would do.

    Nothing of it runs: TensorFlow looks whether a call is cancelled when it has done that.

    Args:
        function: A `tf.types.experimental.ConcreteFunction` that XLA does not compile: XLA would run it.
        argument_spec: The structure of `tf.TypeSpec`s of its argument, whose ranks are known.
    """
    specs = tf.nest.flatten(argument_spec, expand_composites=True)
    empty = [tf.zeros([size or 0 for size in spec.shape], spec.dtype) for spec in specs]
    manager = _cancellation.CancellationManager()
    manager.start_cancel()
    with contextlib.suppress(tf.errors.CancelledError), _cancellation.CancellationManagerContext(manager):
        function(tf.nest.pack_sequence_as(argument_spec, empty, expand_composites=True))


def call_with(handles: Collection[tf.Tensor], graph: tf.Graph, first: int) -> str | None:
    """Returns where a function that was traced before is called with one of the `handles`; `None`: nowhere.

    These are of variables outside of the function that is being traced, of whose `graph` the operations from `first` on
    count.
    """
    wanted = set(map(id, handles))
    inner = {id(inside) for outside, inside in graph.captures if id(outside) in wanted}
    for operation in graph.get_operations()[first:]:
        if operation.type in PLAIN_CALLS:
            if operation.get_attr("f").name.startswith("__backward"):
                continue  # of a gradient: it knows the shape of the variable only
            if any(id(tensor) in inner for tensor in operation.inputs):
                return user_line(operation.outputs[0]) if operation.outputs else operation.name
    return None


def release_with(owner: Any) -> None:
    """Releases the graph that is being traced, and those of functions in it, when `owner` has been deleted.

    Whenever a `tf.custom_gradient` is traced, TensorFlow registers its gradient under a new name, and never removes it:
    megabytes for each model in a process that trains many, also without a strategy. Nobody computes gradients of a
    model's step when the model is gone.
    """
    graphs = _graphs_of.get(owner)
    if graphs is None:
        graphs = _graphs_of[owner] = weakref.WeakSet()
        weakref.finalize(owner, _release, graphs).atexit = False
    graphs.add(tf.compat.v1.get_default_graph())


def _release(graphs: "weakref.WeakSet[Any]") -> None:
    for name, registered in list(gradient_registry._registry.items()):
        if not name.startswith(_PREFIX):
            continue
        if any(graph in graphs for tensor in _tensors_of(registered["type"]) for graph in graphs_around(tensor.graph)):
            gradient_registry._registry.pop(name, None)


def _tensors_of(function: Any) -> Iterator[Any]:
    """Yields the symbolic tensors that a gradient computes with: its variables and those of functions that it calls."""
    waiting, seen = [function], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, _SymbolicTensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += value if isinstance(value, list | tuple) else []
            for cell in (inspect.isfunction(value) and value.__closure__) or ():
                with contextlib.suppress(ValueError):  # the cell is empty
                    waiting.append(cell.cell_contents)
