"""A function of one replica that all columns call in one graph, cut at its exchanges, and what columns send there.

Each column calls the same parts, which TensorFlow optimizes by themselves, so equal tensors give bit-identical results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.compression import Group
from tfdist.model_parallel.columns import summed_over_columns
from tfdist.model_parallel.transfers import WEIGHT_GRADIENT, record_transfer
from tfdist.tensorflow_internals.independent_operations import independent_calls

_NO_EXCHANGE = -1  # the number of the part for what depends on constants alone, which each part computes itself


class ColumnProgram:
    """A pure function of one replica, `function(group, *arguments)`, for all columns.

    Attributes:
        exchanges: How many exchanges a call makes.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any, columns: int) -> None:
        """Traces `function`.

        Args:
            function: Takes a `Group` and `arguments`; returns a structure of tensors.
            arguments: A list of structures of `tf.TensorSpec`.
            columns: How many columns exchange tensors.

        Raises:
            ValueError: The function exchanges tensors within a condition or a loop.
        """
        specs = tf.nest.flatten(arguments)
        structure: list[Any] = []

        def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            group = _RecordingGroup(columns, graph)
            result = function(group, *tf.nest.pack_sequence_as(arguments, tensors))
            outputs = [tf.identity(tensor) for tensor in tf.nest.flatten(result)]
            structure.append((group, tf.nest.pack_sequence_as(result, outputs), outputs))
            return outputs

        with tf.init_scope(), tf.device(None):
            concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)
        group, self._structure, outputs = structure[-1]
        inputs = [tensor.name for tensor in concrete.inputs]
        self._arguments = inputs[: len(specs)]
        self._captured = dict(zip(inputs[len(specs) :], concrete.captured_inputs, strict=True))
        self._exchanges, self._rank = group.exchanges, None if group.rank is None else group.rank.name
        self._outputs = [tensor.name for tensor in outputs]
        self._parts = parts_of(concrete.graph, inputs, group, self._outputs)
        self.exchanges = len(self._exchanges)
        self._traced = concrete  # TensorFlow forgets the branches of its conditions when it is deleted

    def __call__(self, arguments: Sequence[Any], devices: Sequence[str]) -> list[Any]:
        """Adds the calls of all columns to the graph; returns their results.

        Args:
            arguments: By column, on its device.
            devices: By column.
        """
        keep_alive(self)
        known: list[dict[str, tf.Tensor]] = []
        for column, (given, device) in enumerate(zip(arguments, devices, strict=True)):
            tensors = self._captured | dict(zip(self._arguments, tf.nest.flatten(given), strict=True))
            if self._rank is not None:
                with tf.device(device):
                    tensors[self._rank] = tf.constant(column)
            known.append(tensors)
        for number, part in enumerate(self._parts):
            if part is not None:
                for tensors, device in zip(known, devices, strict=True):
                    with tf.device(device), independent_calls():
                        results = part.function(*[tensors[name] for name in part.inputs])
                    tensors.update(zip(part.outputs, results, strict=True))
            if number < self.exchanges:
                exchange = self._exchanges[number]
                sent = [tensors[exchange.sent] for tensors in known]
                received = EXCHANGES[exchange.kind](sent, devices)
                for tensors, tensor in zip(known, received, strict=True):
                    tensors[exchange.received] = tensor
        return [
            tf.nest.pack_sequence_as(self._structure, [tensors[name] for name in self._outputs]) for tensors in known
        ]


@dataclass(frozen=True)
class Exchange:
    """An exchange, and the names of the tensors that a column sends and receives."""

    kind: str
    sent: str
    received: str


class _RecordingGroup(Group):
    """Records the exchanges of a function that is being traced, and returns placeholders for their results."""

    def __init__(self, size: int, graph: Any) -> None:
        self._size, self._graph = size, graph
        self.exchanges: list[Exchange] = []
        self.rank: tf.Tensor | None = None

    @property
    def size(self) -> int:
        return self._size

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._record("sum", tensor, tensor.shape)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        length = tensor.shape[0]
        return self._record("gather", tensor, [length and length * self._size, *tensor.shape[1:]])

    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        received = self._record("exchange", slices, slices.shape)
        if self.rank is None:
            self.rank = tf.compat.v1.placeholder(tf.int32, [], name="rank")
        return received, self.rank

    def _record(self, kind: str, tensor: tf.Tensor, shape: Any) -> tf.Tensor:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                "Columns cannot exchange gradients within a condition or a loop. Received: a compressor whose `reduce` "
                f"calls `group.{kind}` there. Expected: exchanges outside of `tf.cond` and `tf.while_loop`."
            )
        sent = tf.identity(tensor)
        received = tf.compat.v1.placeholder(sent.dtype, shape, name="received")
        self.exchanges.append(Exchange(kind, sent.name, received.name))
        return received


@dataclass(frozen=True)
class _Part:
    """The operations between two exchanges: a function, and the names of the tensors that it takes and returns."""

    function: Any
    inputs: list[str]
    outputs: list[str]
    operations: frozenset[str]  # their names


def parts_of(
    graph: Any, arguments: Sequence[str], group: Any, outputs: Sequence[str], effects: Sequence[tf.Operation] = ()
) -> list[_Part | None]:
    """Returns the parts of a traced function, one more than exchanges; None for a part without operations.

    Args:
        graph: Its graph.
        arguments: The names of its inputs.
        group: What has recorded the exchanges.
        outputs: The names of its results.
        effects: Operations that are executed although no result needs them.
    """
    number = {_operation(name): 0 for name in arguments}
    if group.rank is not None:
        number[group.rank.op.name] = 0
    number |= {_operation(one.received): index + 1 for index, one in enumerate(group.exchanges)}
    sources = set(number)
    wanted = [*outputs, *(one.sent for one in group.exchanges)]
    needed = _needed([*(graph.get_operation_by_name(_operation(name)) for name in wanted), *effects])
    operations = [one for one in _in_order(graph) if one.name in needed and one.name not in sources]
    for one in operations:
        number[one.name] = max((number[given.op.name] for given in one.inputs), default=_NO_EXCHANGE)
    wanted_names = set(wanted)
    parts: list[_Part | None] = []
    definition = graph.as_graph_def()
    for index in range(len(group.exchanges) + 1):
        own = [one for one in operations if number[one.name] == index]
        if index == 0:  # also the results that are constants
            kept = {one.name for one in effects}
            of_constants = [one for one in operations if number[one.name] == _NO_EXCHANGE]
            own += [one for one in of_constants if one.name in kept or _has(one, wanted_names)]
        if not own:
            parts.append(None)
            continue
        names = {one.name for one in own}
        constants = _needed([given.op for one in own for given in one.inputs if number[given.op.name] == _NO_EXCHANGE])
        inputs = {
            given.name: given
            for one in own
            for given in one.inputs
            if number[given.op.name] != _NO_EXCHANGE and given.op.name not in names
        }
        used_later = {given.name for one in operations if one.name not in names for given in one.inputs}
        results = [
            tensor
            for one in own
            for tensor in one.outputs
            if tensor.name in wanted_names or (tensor.name in used_later and number[one.name] != _NO_EXCHANGE)
        ]
        parts.append(part_of(definition, names | constants, list(inputs.values()), results))
    return parts


def part_of(definition: Any, names: set[str], inputs: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> _Part:
    """Returns the operations `names` of a graph as a function that is neither inlined nor ordered after others."""
    placeholders = {tensor.name: f"given_{index}" for index, tensor in enumerate(inputs)}
    part = tf.compat.v1.GraphDef(versions=definition.versions, library=definition.library)
    for node in definition.node:
        if node.name in names:
            copy = part.node.add()
            copy.CopyFrom(node)
            given = [placeholders.get(_full_name(name), name) for name in node.input if not name.startswith("^")]
            del copy.input[:]
            copy.input.extend(given)
            copy.attr.pop("_class", None)
    for tensor in inputs:
        node = part.node.add(name=placeholders[tensor.name], op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())

    def call(*tensors: tf.Tensor) -> list[tf.Tensor]:
        given = {f"given_{index}": tensor for index, tensor in enumerate(tensors)}
        return tf.graph_util.import_graph_def(part, given, [tensor.name for tensor in results], name="")

    function = tf.function(call, autograph=False, experimental_attributes={"_noinline": True})
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    with tf.init_scope(), tf.device(None):
        concrete = function.get_concrete_function(*specs)
    return _Part(concrete, [one.name for one in inputs], [one.name for one in results], frozenset(names))


def keep_alive(program: Any) -> None:
    """Keeps a program as long as the functions that are being traced and call it."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):
        graph.add_to_collection("tfdist_column_programs", program)
        graph = graph.outer_graph


def _in_order(graph: Any) -> list[tf.Operation]:
    """Returns operations after those whose data they take: gradients of loops add inputs to earlier operations."""
    found: dict[str, tf.Operation] = {}
    for last in graph.get_operations():
        waiting = [last]
        while waiting:
            missing = [given.op for given in waiting[-1].inputs if given.op.name not in found]
            if missing:
                waiting += missing
            else:
                one = waiting.pop()
                found[one.name] = one
    return list(found.values())


def _needed(operations: Sequence[tf.Operation]) -> set[str]:
    """The names of `operations` and of all whose data they need."""
    found, waiting = set(), list(operations)
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found.add(one.name)
            waiting += [tensor.op for tensor in one.inputs]
    return found


def _has(operation: tf.Operation, names: set[str]) -> bool:
    return any(tensor.name in names for tensor in operation.outputs)


def _operation(name: str) -> str:
    return name.partition(":")[0]


def _full_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def sum_of_columns(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns for each column the sum of the columns' tensors."""
    return summed_over_columns(tensors, devices, [WEIGHT_GRADIENT])


def gather_columns(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns for each column the tensors of all columns, one after another along axis 0."""
    gathered = []
    for device in devices:
        record_transfer(WEIGHT_GRADIENT, tensors, device)
        with tf.device(device):
            gathered.append(tf.concat(list(tensors), 0))
    return gathered


def exchange_slices(slices: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Sends slice `i` of each column to column `i`.

    Args:
        slices: By column, of shape `[columns, length]`.
        devices: By column.

    Returns:
        By column, the slices that it has received, in the order of the columns.
    """
    sent = []
    for tensor, device in zip(slices, devices, strict=True):
        with tf.device(device):
            sent.append(tf.unstack(tensor, num=len(devices)))
    received = []
    for index, device in enumerate(devices):
        slices_of_all = [of_column[index] for of_column in sent]
        record_transfer(WEIGHT_GRADIENT, slices_of_all, device)
        with tf.device(device):
            received.append(tf.stack(slices_of_all))
    return received


EXCHANGES: dict[str, Callable[[Sequence[tf.Tensor], Sequence[str]], list[tf.Tensor]]] = {
    "sum": sum_of_columns,
    "gather": gather_columns,
    "exchange": exchange_slices,
}
