"""Which tensors the functions of this process keep."""

import gc

from tfdist.private_symbols import private

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
