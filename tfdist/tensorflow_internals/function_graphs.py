"""The graphs of functions: which of them operations run, and which tensors they keep."""

import gc
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.operation_origins import user_line
from tfdist.tensorflow_internals.tensorflow_symbols import FuncGraph

_get_function = private(
    "tensorflow.python.framework.ops:Graph._get_function", "finds the graph that an operation calls"
)

CONDITIONS = frozenset({"If", "StatelessIf"})
LOOPS = frozenset({"While", "StatelessWhile"})
PLAIN_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


def called_graph(graph: Any, name: str) -> Any:
    """Returns the graph of the function `name` that an operation of `graph` calls, or `None`."""
    while graph is not None:
        function = _get_function(graph, name)
        if function is not None:
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None


def captured_handles(ignored: str) -> set[int]:
    """Returns the ids of the tensors that the graphs of functions in this process have captured.

    Graphs whose names begin with `ignored` do not count, nor the graphs within them.
    """
    handles: set[int] = set()
    for graph in [candidate for candidate in gc.get_objects() if isinstance(candidate, FuncGraph)]:
        around, names = graph, []
        while isinstance(around, FuncGraph):
            names.append(around.name)
            around = around.outer_graph
        if not any(name.startswith(ignored) for name in names):
            handles.update(map(id, graph.external_captures))
    return handles


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
