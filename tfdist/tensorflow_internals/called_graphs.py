"""The graphs of the functions that calls, conditions and loops run."""

from typing import Any

from tfdist.private_symbols import private

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
