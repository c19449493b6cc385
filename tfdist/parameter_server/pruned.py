"""A part of a function that was traced, as a function of its own."""

from typing import Any

import tensorflow as tf


class Pruned:
    """The part of a traced function that its one output needs, as a function.

    Attributes:
      operations: the types of its operations, sorted.
      reads: how many variables, or other tensors from outside, it uses.
    """

    def __init__(self, traced: Any) -> None:
        """Keeps what `traced`, a concrete function with one output, needs."""
        [output] = traced.outputs
        needed = _needed(output.op)
        number = len(traced.inputs) - len(traced.captured_inputs)
        self._places = [place for place, given in enumerate(traced.inputs[:number]) if given.op.name in needed]
        captured = zip(traced.inputs[number:], traced.captured_inputs, strict=True)
        handles = {given.op.name: handle for given, handle in captured if given.op.name in needed}
        inputs = [traced.inputs[place].op.name for place in self._places]
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
        """The output for all tensors that the traced function takes."""
        return self._function(*[tensors[place] for place in self._places])


def _needed(operation: Any) -> dict[str, str]:
    """The operations whose data `operation` needs, with itself: their types, by name.

    Not what only comes before it: TensorFlow lets a function's outputs wait for assertions and reads of the rest.
    """
    found, waiting = {}, [operation]
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found[one.name] = one.type
            waiting += [tensor.op for tensor in one.inputs]
    return found
