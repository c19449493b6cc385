"""Looks at traced functions: captured tensors, origins of operations, table lookups; prunes and finishes them."""

import contextlib
import functools
import gc
import inspect
import os
import weakref
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.tensorflow_symbols import get_default_graph

_FuncGraph = private("tensorflow.python.framework.func_graph:FuncGraph", "a graph of a function")


def captured_handles(ignored: str) -> set[int]:
    """Returns the ids of the tensors that the graphs of functions in this process have captured.

    Args:
        ignored: The beginning of the names of graphs that do not count, nor the graphs within them.
    """
    found: set[int] = set()
    for graph in [one for one in gc.get_objects() if isinstance(one, _FuncGraph)]:
        around, names = graph, []
        while isinstance(around, _FuncGraph):
            names.append(around.name)
            around = around.outer_graph
        if not any(name.startswith(ignored) for name in names):
            found.update(map(id, graph.external_captures))
    return found


def call_with(handles: Collection[tf.Tensor], graph: tf.Graph, first: int) -> str | None:
    """Returns where a function that was traced before is called with one of the `handles` of variables.

    Args:
        handles: Of variables outside of the function that is being traced.
        graph: Of that function.
        first: The number of the first operation of the graph to look at.

    Returns:
        `None`: nowhere.
    """
    wanted = set(map(id, handles))
    inner = {id(inside) for outside, inside in graph.captures if id(outside) in wanted}
    for operation in graph.get_operations()[first:]:
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
            if operation.get_attr("f").name.startswith("__backward"):
                continue  # of a gradient: it knows the shape of the variable only
            if any(id(given) in inner for given in operation.inputs):
                return user_line(operation.outputs[0]) if operation.outputs else operation.name
    return None


_KERAS_FUNCTIONS = ("ops", "backend", "random", "utils")  # which programs call, too


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


OF_SHAPES = frozenset({"OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"})  # do not depend on values


class PrunedFunction:
    """The part of a traced function that its only output needs.

    Attributes:
        operations: The types of its operations, sorted.
        reads: How many variables and other captured tensors it uses.
        values: The positions of the arguments on whose values, not only on whose shapes, the output depends.
    """

    def __init__(self, traced: Any) -> None:
        """Prunes `traced`, a concrete function with one output."""
        [output] = traced.outputs
        needed = needed_operations(output.op)
        number = len(traced.inputs) - len(traced.captured_inputs)
        self._used = [index for index, given in enumerate(traced.inputs[:number]) if given.op.name in needed]
        of_values = needed_operations(output.op, OF_SHAPES)
        self.values = [index for index, given in enumerate(traced.inputs[:number]) if given.op.name in of_values]
        captured = zip(traced.inputs[number:], traced.captured_inputs, strict=True)
        handles = {given.op.name: handle for given, handle in captured if given.op.name in needed}
        inputs = [traced.inputs[index].op.name for index in self._used]
        self.reads = len(handles)
        self.operations = sorted(needed[name] for name in needed.keys() - {*inputs, *handles})
        graph = traced.graph.as_graph_def()
        nodes = [node for node in graph.node if node.name in needed]
        del graph.node[:]
        graph.node.extend(nodes)
        for node in graph.node:
            data = [name for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend(data)

        def function(*tensors: tf.Tensor) -> tf.Tensor:
            given = dict(zip(inputs, tensors, strict=True))
            given |= {name: tf.identity(handle) for name, handle in handles.items()}
            [result] = tf.graph_util.import_graph_def(graph, given, [output.name], name="")
            return result

        self._function = tf.function(function, autograph=False, reduce_retracing=True)

    def __call__(self, *tensors: tf.Tensor) -> tf.Tensor:
        """Computes the output; takes all tensors that the traced function takes."""
        return self._function(*[tensors[index] for index in self._used])


def needed_operations(operation: Any, ends: Collection[str] = ()) -> dict[str, str]:
    """The types, by name, of `operation` and all operations whose data it needs, not beyond those of the types `ends`.

    Control inputs do not count: through them a function's outputs wait for assertions and reads elsewhere in it.
    """
    found, waiting = {}, [operation]
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found[one.name] = one.type
            waiting += [] if one.type in ends else [tensor.op for tensor in one.inputs]
    return found


_LOOKUPS = ("Gather", "GatherV2")
_SAME_ROWS = ("Cast", "Identity")


def tables_of_fixed_rows(traced: Any, tables: int, received: Iterable[str] = ()) -> set[int]:
    """Returns the positions of the tables whose rows do not depend on the values of the other arguments.

    Args:
        traced: A concrete function.
        tables: How many of its first arguments are tables.
        received: The names of further operations whose values may differ in each call.
    """
    own = traced.inputs[: len(traced.inputs) - len(traced.captured_inputs)]
    positions = {tensor.op.name: position for position, tensor in enumerate(own[:tables])}
    others = {*(tensor.op.name for tensor in own[tables:]), *received}
    is_fixed: dict[int, bool] = {}
    for operation in traced.graph.get_operations():
        if operation.type in _LOOKUPS and (name := _source(operation.inputs[0])) in positions:
            position = positions[name]
            depends = not others.isdisjoint(needed_operations(operation.inputs[1].op, OF_SHAPES))
            is_fixed[position] = is_fixed.get(position, True) and not depends
    return {position for position, fixed in is_fixed.items() if fixed}


def _source(tensor: tf.Tensor) -> str:
    operation = tensor.op
    while operation.type in _SAME_ROWS:
        operation = operation.inputs[0].op
    return str(operation.name)


_gradients = private(
    "tensorflow.python.framework.ops:gradient_registry",
    "holds the gradient of each call of a `tf.custom_gradient`, with its graph",
)
_SymbolicTensor = private("tensorflow.python.framework.ops:SymbolicTensor", "a tensor of a graph")
_PREFIX = "CustomGradient-"  # of the names under which they are registered

_graphs_of: weakref.WeakKeyDictionary[Any, "weakref.WeakSet[Any]"] = weakref.WeakKeyDictionary()


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
    graphs.add(get_default_graph())


def _release(graphs: "weakref.WeakSet[Any]") -> None:
    for name, registered in list(_gradients._registry.items()):
        if not name.startswith(_PREFIX):
            continue
        if any(graph in graphs for tensor in _tensors_of(registered["type"]) for graph in _outward(tensor.graph)):
            _gradients._registry.pop(name, None)


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


def _outward(graph: Any) -> Iterator[Any]:
    """Yields a graph and those around it."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)
