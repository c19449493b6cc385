"""Which tensors the functions of this process keep."""

import gc
from collections.abc import Collection

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.operation_origins import user_line

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
