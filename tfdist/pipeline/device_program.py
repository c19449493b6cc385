"""A function of one device that several devices call in one graph: traced once, cut at the exchanges between them.

Each device calls the same parts, which TensorFlow optimizes by themselves, so equal tensors give bit-identical results.
Between the parts, tensors are copied from device to device.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.losses.pruned_function import needed_operations
from tfdist.tensorflow_internals.operation_order import independent_calls

Send = Callable[[Sequence[tf.Tensor], Sequence[str], Any], list[tf.Tensor]]


@dataclass(frozen=True)
class Exchange:
    """A place where a function is cut.

    Attributes:
        sent: The name of the tensor that a device sends.
        received: The name of the tensor that it receives.
        shape: The shape of what it sends.
        send: Takes by device what is sent, the devices, and the number of samples if it is not static; returns by
            device what is received. None if the backward pass begins here: its caller gives what is received.
    """

    sent: str
    received: str
    shape: tf.TensorShape
    send: Send | None


class ExchangeRecord:
    """Records the exchanges of a function that is being traced, and returns placeholders for their results.

    Attributes:
        exchanges: What was recorded so far.
        rank: The number of the device, an int32 scalar; None if nothing uses it.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.exchanges: list[Exchange] = []
        self.rank: tf.Tensor | None = None

    def own_rank(self) -> tf.Tensor:
        """Returns the number of this device, an int32 scalar."""
        if self.rank is None:
            with self._graph.as_default(), tf.control_dependencies(None):
                self.rank = tf.compat.v1.placeholder(tf.int32, [], name="rank")
        return self.rank

    def add(self, tensor: tf.Tensor, shape: Any, of_received: Any, send: Send | None, rejection: str) -> tf.Tensor:
        """Records an exchange, and returns what a device receives, of the shape `of_received`.

        A device sends `tensor`, whose shape the caller knows. The `rejection` says why it may not be in a loop.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(rejection)
        sent = tf.identity(tf.convert_to_tensor(tensor))
        received = tf.compat.v1.placeholder(sent.dtype, of_received, name="received")
        self.exchanges.append(Exchange(sent.name, received.name, tf.TensorShape(shape), send))
        return received


class DeviceProgram:
    """A pure function of one device, `function(group, *arguments)`, for several devices.

    It returns results and gradients. Those are computed by a backward pass, which begins at the first exchange without
    `send`; a function without such an exchange has a forward pass alone.

    Attributes:
        calls: Before each exchange and after the last one, the functions that a device calls in turn.
        received: The names of the operations in place of what exchanges return.
        graph: What was traced.
        traced: The function of this graph, whose inputs are the arguments.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Any, Any]],
        arguments: Sequence[Any],
        devices: int,
        group: Callable[[int, Any], ExchangeRecord],
    ) -> None:
        """Traces `function`, which takes a group and `arguments`, structures of `tf.TensorSpec` and None.

        It returns the results and the gradients, structures of tensors and None. `group` makes what records the
        exchanges, for this number of devices and a graph.
        """
        specs = [spec for spec in tf.nest.flatten(arguments) if spec is not None]
        traces: list[Any] = []

        def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
            recorded, waiting = group(devices, tf.compat.v1.get_default_graph()), iter(tensors)
            of_device = _mapped(lambda spec: next(waiting), list(arguments))
            # Copies, whose names belong to no other result.
            results = _mapped(tf.identity, function(recorded, *of_device))
            traces.append((recorded.exchanges, recorded.rank, results))
            return [tensor for tensor in tf.nest.flatten(results) if tensor is not None]

        with tf.init_scope(), tf.device(None):
            concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)
        self._exchanges, rank, results = traces[-1]
        self._rank = None if rank is None else rank.name
        self._result, self._gradients = _mapped(lambda tensor: tensor.name, results)
        inputs = [tensor.name for tensor in concrete.inputs]
        self._arguments = inputs[: len(specs)]
        self._captured = dict(zip(inputs[len(specs) :], concrete.captured_inputs, strict=True))
        sources = inputs if rank is None else [*inputs, rank.name]
        outputs = [tensor.name for tensor in tf.nest.flatten(results) if tensor is not None]
        self.calls = parts_between_exchanges(concrete.graph, sources, self._exchanges, outputs)
        self.received = [_operation(exchange.received) for exchange in self._exchanges]
        starts = [number for number, exchange in enumerate(self._exchanges) if exchange.send is None]
        self._end_of_forward = starts[0] if starts else len(self._exchanges)
        self.graph, self.traced = concrete.graph, concrete  # TensorFlow forgets its conditions when it is deleted

    def forward(
        self,
        arguments: Sequence[Any],
        devices: Sequence[str],
        after: Sequence[list[tf.Operation]] | None = None,
        rows: Any = None,
    ) -> tuple[list[Any], "ProgramState"]:
        """Adds the forward pass of all devices to the graph; see `StageFunction.forward`."""
        _keep_alive(self)
        known: list[dict[str, tf.Tensor]] = []
        for rank, (of_device, device) in enumerate(zip(arguments, devices, strict=True)):
            leaves = [leaf for leaf in tf.nest.flatten(of_device) if leaf is not None]
            tensors = self._captured | dict(zip(self._arguments, leaves, strict=True))
            if self._rank is not None:
                with tf.device(device):
                    tensors[self._rank] = tf.constant(rank)
            known.append(tensors)
        state = ProgramState(known, devices, rows)
        self._run(state, 0, self._end_of_forward, after or [[] for _ in devices])
        return [_mapped(tensors.__getitem__, self._result) for tensors in known], state

    def backward(
        self, state: "ProgramState", seeds: Sequence[Sequence[tf.Tensor]], after: Sequence[list[tf.Operation]]
    ) -> list[Any]:
        """Adds the backward pass of all devices to the graph, and returns by device the gradients.

        `seeds` are by device what it receives at the exchanges without `send`, in their order.
        """
        names = [exchange.received for exchange in self._exchanges if exchange.send is None]
        for tensors, of_device in zip(state.known, seeds, strict=True):
            tensors.update(zip(names, of_device, strict=True))
        self._run(state, self._end_of_forward + 1, len(self._exchanges), after)
        return [_mapped(tensors.__getitem__, self._gradients) for tensors in state.known]

    def _run(self, state: "ProgramState", first: int, last: int, after: Sequence[list[tf.Operation]]) -> None:
        """Calls the parts `first` to `last`, and makes the exchanges between them."""
        for number in range(first, last + 1):
            for tensors, device, earlier in zip(state.known, state.devices, after, strict=True):
                before = earlier
                for part in self.calls[number]:
                    with tf.device(device), tf.control_dependencies(before), independent_calls():
                        results = part.function(*[tensors[name] for name in part.inputs])
                    tensors.update(zip(part.outputs, results, strict=True))
                    before = [result.op for result in results[:1]]  # the rest, when what is sent is computed
            if number == last or self._exchanges[number].send is None:
                continue
            exchange = self._exchanges[number]
            sent = [tensors[exchange.sent] for tensors in state.known]
            for tensor in sent:  # functions made from parts of a graph do not know all shapes of their results
                tensor.set_shape(exchange.shape)
            received = exchange.send(sent, state.devices, state.rows)
            for tensors, tensor in zip(state.known, received, strict=True):
                tensors[exchange.received] = tensor


@dataclass(frozen=True)
class ProgramState:
    """The tensors of a call by device and name, between its forward and its backward pass."""

    known: list[dict[str, tf.Tensor]]
    devices: Sequence[str]
    rows: Any


@dataclass(frozen=True)
class Part:
    """Operations before an exchange: a function, and the names of the tensors that it takes and returns."""

    function: Any
    inputs: list[str]
    outputs: list[str]


def parts_between_exchanges(
    graph: Any, sources: Sequence[str], exchanges: Sequence[Exchange], outputs: Sequence[str]
) -> list[list[Part]]:
    """Returns the parts of a traced graph: before each exchange and after the last one, those to be called in turn.

    `sources` are the names of its inputs, and of the number of the device, `outputs` those of its results.
    """
    number = {_operation(name): 0 for name in sources}
    number |= {_operation(exchange.received): index + 1 for index, exchange in enumerate(exchanges)}
    wanted = {*outputs, *(exchange.sent for exchange in exchanges)}
    # As in a `tf.function`, such as prints and assertions, whose control dependencies are lost between parts.
    effects = [operation for operation in graph.get_operations() if operation.op_def.is_stateful]
    needed = needed_operations(*(graph.get_operation_by_name(_operation(name)) for name in wanted), *effects)
    computed = needed.keys() - number.keys()
    operations = [operation for operation in _in_order(graph) if operation.name in computed]
    for operation in operations:
        number[operation.name] = max((number[tensor.op.name] for tensor in operation.inputs), default=_NO_EXCHANGE)
    of_effects = {operation.name for operation in effects}
    cut = _CutGraph(graph, {name for name, index in number.items() if index == _NO_EXCHANGE})
    parts: list[list[Part]] = []
    for index in range(len(exchanges) + 1):
        of_part = [operation for operation in operations if number[operation.name] == index]
        if index == 0:  # also results and effects of constants
            constants = [operation for operation in operations if number[operation.name] == _NO_EXCHANGE]
            of_part += [
                constant
                for constant in constants
                if constant.name in of_effects or wanted & {tensor.name for tensor in constant.outputs}
            ]
        names = {operation.name for operation in of_part}
        later = [operation for operation in operations if operation.name not in names]
        of_later = {tensor.name for operation in later for tensor in operation.inputs}
        returned = wanted | {name for name in of_later if number[_operation(name)] != _NO_EXCHANGE}
        is_sent = index < len(exchanges) and exchanges[index].send is not None
        sent = graph.get_tensor_by_name(exchanges[index].sent).op if is_sent else None
        parts.append([cut.part(*pair) for pair in cut.urgent_first(of_part, returned, sent)])
    return parts


_NO_EXCHANGE = -1  # the number of the part for what depends on constants alone, which each part computes itself

# Without one of these a remainder takes no longer than the call of a function.
_COSTLY = frozenset(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "UnsortedSegmentSum"))

_Operations = tuple[list[tf.Operation], Collection[str]]  # and the names of the tensors that others take


class _CutGraph:
    """Makes functions of operations of a graph."""

    def __init__(self, graph: Any, of_constants: set[str]) -> None:
        """Cuts `graph`, in which operations with the names `of_constants` depend on constants alone."""
        self._definition, self._of_constants = graph.as_graph_def(), of_constants

    def urgent_first(
        self, operations: list[tf.Operation], returned: Collection[str], sent: tf.Operation | None
    ) -> list[_Operations]:
        """Returns what a sent tensor needs, and the rest, to be called while it is sent; all if that costs little."""
        if not operations:
            return []
        names = {operation.name for operation in operations}
        if sent is None or sent.name not in names:
            return [(operations, returned)]
        first = needed_operations(sent).keys() | self._of_constants
        rest = [operation for operation in operations if operation.name not in first]
        if not any(operation.type in _COSTLY for operation in rest):
            return [(operations, returned)]
        later = {operation.name for operation in rest}
        urgent = [operation for operation in operations if operation.name not in later]  # and prints, which none needs
        taken = [tensor for operation in rest for tensor in operation.inputs]
        passed = {tensor.name for tensor in taken if tensor.op.name not in self._of_constants}
        return [(urgent, {*returned, *passed}), (rest, returned)]

    def part(self, operations: list[tf.Operation], returned: Collection[str]) -> Part:
        """Returns operations, with the constants that they need, as a function that is neither inlined nor ordered."""
        names = {operation.name for operation in operations}
        taken = {tensor.name: tensor for operation in operations for tensor in operation.inputs}
        outside = [tensor for tensor in taken.values() if tensor.op.name not in names]
        constants = [tensor.op for tensor in outside if tensor.op.name in self._of_constants]
        inputs = [tensor for tensor in outside if tensor.op.name not in self._of_constants]
        results = [tensor for operation in operations for tensor in operation.outputs if tensor.name in returned]
        names |= needed_operations(*constants).keys()
        placeholders = {tensor.name: f"tfdist_input_{index}" for index, tensor in enumerate(inputs)}
        part = tf.compat.v1.GraphDef(versions=self._definition.versions, library=self._definition.library)
        for node in self._definition.node:
            if node.name in names:
                copy = part.node.add()
                copy.CopyFrom(node)
                data = [name for name in node.input if not name.startswith("^")]
                del copy.input[:]
                copy.input.extend(placeholders.get(name if ":" in name else f"{name}:0", name) for name in data)
                copy.attr.pop("_class", None)
        for tensor in inputs:
            node = part.node.add(name=placeholders[tensor.name], op="Placeholder")
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())

        def call(*tensors: tf.Tensor) -> list[tf.Tensor]:
            mapped = {f"tfdist_input_{index}": tensor for index, tensor in enumerate(tensors)}
            return tf.graph_util.import_graph_def(part, mapped, [tensor.name for tensor in results], name="")

        function = tf.function(call, autograph=False, experimental_attributes={"_noinline": True})
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
        with tf.init_scope(), tf.device(None):
            concrete = function.get_concrete_function(*specs)
        return Part(concrete, [tensor.name for tensor in inputs], [tensor.name for tensor in results])


def _keep_alive(program: DeviceProgram) -> None:
    """Keeps a program as long as the functions that are being traced and call it."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):
        graph.add_to_collection("tfdist_device_programs", program)
        graph = graph.outer_graph


def _in_order(graph: Any) -> list[tf.Operation]:
    """Returns operations after those whose data they take: gradients of loops add inputs to earlier operations."""
    ordered: dict[str, tf.Operation] = {}
    for last in graph.get_operations():
        waiting = [last]
        while waiting:
            missing = [tensor.op for tensor in waiting[-1].inputs if tensor.op.name not in ordered]
            if missing:
                waiting += missing
            else:
                operation = waiting.pop()
                ordered[operation.name] = operation
    return list(ordered.values())


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), structure)


def _operation(name: str) -> str:
    return name.partition(":")[0]
