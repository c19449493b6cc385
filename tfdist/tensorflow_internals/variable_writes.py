"""Which variables a part of a program changes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.private_symbols import private

_FuncGraph = private("tensorflow.python.framework.func_graph:FuncGraph", "the graph of a function")
_CALLS = ("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp")


class WrittenVariables:
    """Finds those of some variables that operations change from the creation of this object on.

    In a graph by the operations that have been added to it and take a variable but do not read it, eagerly by the
    values of the variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        """Watches variables, also distributed ones, which are few and small."""
        self._variables = list(variables)
        self._graph = tf.compat.v1.get_default_graph()
        self._operations = 0 if tf.executing_eagerly() else len(self._graph.get_operations())
        self._values = [variable.numpy() for variable in self._variables] if tf.executing_eagerly() else []

    def find(self) -> list[str]:
        """Returns the names of the variables that were changed."""
        if not isinstance(self._graph, _FuncGraph):
            pairs = zip(self._variables, self._values, strict=True)
            return [one.name for one, value in pairs if not np.array_equal(one.numpy(), value, equal_nan=True)]
        handles = {id(part.handle): one.name for one in self._variables for part in _parts(one)}
        new = self._graph.get_operations()[self._operations :]
        inputs = {id(tensor) for one in new if one.type not in _CALLS for tensor in one.inputs}
        written = []
        for inner, outer in _captures(self._graph):
            if id(inner) in inputs and id(outer) in handles:
                written.append(handles[id(outer)])
        return written


def _parts(variable: Any) -> Sequence[Any]:
    return variable.values if isinstance(variable, tf.distribute.DistributedValues) else [variable]


def _captures(graph: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """The placeholders of a function's graph for resources, each with the tensor of the program that it stands for."""
    return [(inner, _outermost(held, graph.outer_graph)) for held, inner in graph.captures]


def _outermost(held: Any, graph: Any) -> Any:
    while isinstance(graph, _FuncGraph) and getattr(held, "graph", None) is graph:
        captures, outer = _around(graph)
        held, graph = next((known for known, placeholder in captures if placeholder is held), held), outer
    return held


def _around(graph: Any) -> Any:
    return graph.captures, graph.outer_graph
