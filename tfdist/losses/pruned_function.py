"""The part of a traced function that one of its outputs needs."""

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.function_graphs import operations_behind

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
        of_values = needed_operations(output.op, ends=OF_SHAPES)
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


def needed_operations(*operations: Any, ends: Collection[str] = ()) -> dict[str, str]:
    """The types, by name, of `operations` and all whose data they need, not beyond those of the types `ends`.

    Control inputs do not count: through them a function's outputs wait for assertions and reads elsewhere in it.
    """
    behind = operations_behind(*operations, inputs_of=lambda needed: () if needed.type in ends else needed.inputs)
    return {needed.name: needed.type for needed in behind}
