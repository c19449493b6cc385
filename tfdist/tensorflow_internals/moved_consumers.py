"""Moves operations of a graph from tensors to others with the same values, which are computed later."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.function_graphs import PLAIN_CALLS, called_graph

private(
    "tensorflow.python.framework.ops:Operation._update_input",
    "lets backpropagation use weights that are gathered again, so that those of the forward pass are freed",
)
_create_op = private(
    "tensorflow.python.framework.func_graph:FuncGraph._create_op_internal",
    "computes casts and transposes of these weights again",
)


class Derived:
    """Some tensors of a graph, what is computed from them alone (as casts), and who uses these at the moment."""

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._sources = list(tensors)
        self._users: dict[Any, set[str]] = {}  # by the reference of a tensor: the names of its present consumers
        self._arguments: dict[Any, Any] = {}  # by that of a result of a call: that of the argument which it is
        waiting = list(tensors)
        known = {tensor.ref() for tensor in waiting}
        while waiting:
            tensor = waiting.pop()
            consumers = tensor.consumers()
            self._users[tensor.ref()] = {operation.name for operation in consumers}
            for operation in consumers:
                if _is_function_of(operation, known):
                    new = [output for output in operation.outputs if output.ref() not in known]
                    known.update(output.ref() for output in new)
                    waiting += new

    def note_users(self) -> None:
        """Counts all present consumers as those that used the tensors before."""
        self._follow_calls()
        for reference in self._users:
            self._users[reference] = {operation.name for operation in reference.deref().consumers()}

    def has_new_users(self) -> bool:
        """Whether operations use one of the tensors that did not do so before."""
        self._follow_calls()
        return any(True for _ in self._new_users())

    def move_new_users(self, values: Sequence[tf.Tensor]) -> None:
        """Makes the operations that did not use the tensors before use `values` in place of them."""
        self._follow_calls()
        moved = {source.ref(): value for source, value in zip(self._sources, values, strict=True)}
        for operation, index, tensor in list(self._new_users()):
            operation._update_input(index, self._computed(tensor, moved))

    def _new_users(self) -> Iterator[tuple[Any, int, tf.Tensor]]:
        for reference, names in self._users.items():
            tensor = reference.deref()
            for operation in tensor.consumers():
                if operation.name not in names:
                    yield from ((operation, index, one) for index, one in enumerate(operation.inputs) if one is tensor)

    def _follow_calls(self) -> None:
        """Adds what a differentiated function returns of its arguments, as it does for backpropagation."""
        for reference in list(self._users):
            for operation in reference.deref().consumers():
                for output, index in _passed_on(operation):
                    if operation.inputs[index].ref() == reference and output.ref() not in self._users:
                        self._users[output.ref()] = set()
                        self._arguments[output.ref()] = reference

    def _computed(self, tensor: tf.Tensor, moved: dict[Any, tf.Tensor]) -> tf.Tensor:
        """Returns the value of a tensor, computed from those in `moved`, to which it is added."""
        reference = tensor.ref()
        if reference in moved:
            return moved[reference]
        if reference in self._arguments:
            moved[reference] = self._computed(self._arguments[reference].deref(), moved)
            return moved[reference]
        if reference not in self._users:
            return tensor  # a constant
        operation = tensor.op
        copy = _create_op(
            operation.graph,
            operation.type,
            [self._computed(one, moved) for one in operation.inputs],
            [output.dtype for output in operation.outputs],
            name=f"{operation.name}_again",
            attrs=dict(operation.node_def.attr),
        )
        for output, again in zip(operation.outputs, copy.outputs, strict=True):
            again.set_shape(output.shape)
            moved[output.ref()] = again
        return moved[reference]


def _is_function_of(operation: Any, known: Mapping[Any, Any] | set[Any]) -> bool:
    """Whether an operation computes from known tensors and constants alone, and may be computed twice."""
    if operation.type in PLAIN_CALLS or operation.op_def.is_stateful or not operation.outputs:
        return False
    return all(one.ref() in known or one.op.type == "Const" for one in operation.inputs)


def _passed_on(operation: Any) -> Iterator[tuple[tf.Tensor, int]]:
    """Yields the outputs of the call of a function that are its arguments, with the positions of these."""
    if operation.type not in PLAIN_CALLS:
        return
    graph = called_graph(operation.graph, operation.get_attr("f").name)
    if graph is None:
        return
    positions = {tensor.ref(): index for index, tensor in enumerate(graph.inputs)}
    for output, inner in zip(operation.outputs, graph.outputs, strict=False):
        while inner.op.type == "Identity":
            inner = inner.op.inputs[0]
        if inner.ref() in positions:
            yield output, positions[inner.ref()]
