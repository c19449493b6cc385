"""A stage with its gradient for all devices that share it: traced once, cut at the exchanges, which it makes.

Each device calls the same parts, which TensorFlow optimizes by themselves, so whole tensors stay bit-identical.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.column_program import keep_alive, part_of, parts_of
from tfdist.model_parallel.shard_group import SEED, SUM, ShardGroup
from tfdist.model_parallel.transfers import ACTIVATION, ACTIVATION_GRADIENT, record_transfer
from tfdist.tensorflow_internals.independent_operations import independent_calls


class ShardProgram:
    """A pure function of one device and its gradient, for all devices of a stage.

    Attributes:
        ways: The number of devices.
        calls: Before each exchange and after the last one, the functions that a device calls in turn.
        graph: What was traced.
        received: The names of the operations in place of what exchanges return.
        traced: The function of this graph, whose inputs are the arguments.
    """

    def __init__(self, function: Callable[[ShardGroup, Any], tuple[Any, Callable[[], Any]]], specs: Any, ways: int):
        """Traces `function`.

        Args:
            function: Takes a `ShardGroup` and the arguments; returns a structure of results, and the function that
                returns the structure of gradients with the group's seeds.
            specs: The structure of the arguments, of `tf.TensorSpec` and None.
            ways: How many devices compute together.

        Raises:
            ValueError: Devices exchange tensors within a condition or a loop.
        """
        self.ways = ways
        flat = [spec for spec in tf.nest.flatten(specs) if spec is not None]
        traced_parts: list[Any] = []

        def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
            group = ShardGroup(ways, tf.compat.v1.get_default_graph())
            waiting = iter(tensors)
            given = tf.nest.map_structure(lambda spec: None if spec is None else next(waiting), specs)
            result, differentiate = function(group, given)
            result = _named(result)
            forward = len(group.exchanges)
            gradients = _named(differentiate())
            traced_parts.append((group, result, forward, gradients))
            return [one for one in tf.nest.flatten((result, gradients)) if one is not None]

        with tf.init_scope(), tf.device(None):
            concrete = tf.function(traced, autograph=False).get_concrete_function(*flat)
        group, result, self._forward_exchanges, gradients = traced_parts[-1]
        self._result, self._gradients = (tf.nest.map_structure(_name, one) for one in (result, gradients))
        inputs = [tensor.name for tensor in concrete.inputs]
        self._arguments = inputs[: len(flat)]
        self._captured = dict(zip(inputs[len(flat) :], concrete.captured_inputs, strict=True))
        self._exchanges, self._rank = group.exchanges, None if group.rank is None else group.rank.name
        outputs = [name for name in tf.nest.flatten((self._result, self._gradients)) if name is not None]
        # As in a `tf.function`, such as prints and assertions, whose control dependencies are lost between parts.
        effects = [one for one in concrete.graph.get_operations() if one.op_def.is_stateful]
        self._parts = parts_of(concrete.graph, inputs, group, outputs, effects)
        definition = concrete.graph.as_graph_def()
        self.calls = [
            urgent_first(concrete.graph, definition, part, one.sent) if one is not None and one.kind != SEED else [part]
            for part, one in zip(self._parts, [*self._exchanges, None], strict=True)
        ]
        # Functions made from parts of a graph do not know all shapes of their results.
        self._shapes = [None if one.kind == SEED else group.sent_shapes[one.sent] for one in self._exchanges]
        self.received = [one.received.partition(":")[0] for one in self._exchanges]
        self.graph, self.traced = concrete.graph, concrete  # TensorFlow forgets its conditions when it is deleted

    def forward(
        self, arguments: Sequence[Any], devices: Sequence[str], after: Sequence[list[tf.Operation]], rows: Any
    ) -> tuple[list[Any], "ShardState"]:
        """Adds the forward pass of all devices to the graph.

        Args:
            arguments: By device, on it.
            devices: Their full names.
            after: By device, the operations for which it waits.
            rows: The number of samples, if it is not static.

        Returns:
            By device the results, and what the backward pass needs.
        """
        keep_alive(self)
        known: list[dict[str, tf.Tensor]] = []
        for rank, (given, device) in enumerate(zip(arguments, devices, strict=True)):
            leaves = [leaf for leaf in tf.nest.flatten(given) if leaf is not None]
            tensors = self._captured | dict(zip(self._arguments, leaves, strict=True))
            if self._rank is not None:
                with tf.device(device):
                    tensors[self._rank] = tf.constant(rank)
            known.append(tensors)
        state = ShardState(known, devices, rows)
        self._run(state, 0, self._forward_exchanges, after, ACTIVATION)
        return [_filled(self._result, tensors) for tensors in known], state

    def backward(
        self, state: "ShardState", seeds: Sequence[Sequence[tf.Tensor]], after: Sequence[list[tf.Operation]]
    ) -> list[Any]:
        """Adds the backward pass of all devices to the graph.

        Args:
            state: That of the forward pass.
            seeds: By device, the gradients of the loss with respect to the targets in their order.
            after: By device, the operations for which it waits.

        Returns:
            By device, the gradients.
        """
        names = [one.received for one in self._exchanges if one.kind == SEED]
        for tensors, given in zip(state.known, seeds, strict=True):
            tensors.update(zip(names, given, strict=True))
        self._run(state, self._forward_exchanges + 1, len(self._exchanges), after, ACTIVATION_GRADIENT)
        return [_filled(self._gradients, tensors) for tensors in state.known]

    def _run(self, state: "ShardState", first: int, last: int, after: Any, kind: str) -> None:
        """Runs the parts `first` to `last`, and the exchanges between them."""
        for number in range(first, last + 1):
            for tensors, device, earlier in zip(state.known, state.devices, after, strict=True):
                before = earlier
                for part in [one for one in self.calls[number] if one is not None]:
                    with tf.device(device), tf.control_dependencies(before), independent_calls():
                        results = part.function(*[tensors[name] for name in part.inputs])
                    tensors.update(zip(part.outputs, results, strict=True))
                    before = [one.op for one in results[:1]]  # the rest, when what is sent is computed
            if number < last and self._exchanges[number].kind != SEED:
                exchange = self._exchanges[number]
                make = summed_over_shards if exchange.kind == SUM else gathered_from_shards
                sent = [tensors[exchange.sent] for tensors in state.known]
                for tensor in sent:
                    tensor.set_shape(self._shapes[number])
                received = make(sent, state.devices, kind, state.rows)
                for tensors, tensor in zip(state.known, received, strict=True):
                    tensors[exchange.received] = tensor


class ShardState:
    """The tensors of a micro-batch by device and name, between its forward and its backward pass."""

    def __init__(self, known: list[dict[str, tf.Tensor]], devices: Sequence[str], rows: Any) -> None:
        self.known, self.devices, self.rows = known, devices, rows


def _named(structure: Any) -> Any:
    """Returns copies of the tensors, whose names belong to no other result."""
    return tf.nest.map_structure(lambda one: None if one is None else tf.identity(one), structure)


def _name(tensor: Any) -> Any:
    return None if tensor is None else tensor.name


def _filled(names: Any, tensors: dict[str, tf.Tensor]) -> Any:
    return tf.nest.map_structure(lambda name: None if name is None else tensors[name], names)


def summed_over_shards(tensors: Sequence[tf.Tensor], devices: Sequence[str], kind: str, rows: Any) -> list[tf.Tensor]:
    """Returns for each device the sum of all tensors, bit-identical.

    Each device adds one slice of all tensors and sends the sum to the others: `2 (k - 1) / k` of the size in total, as
    in a ring. With two devices, or an axis of features that is not divisible, each sends its tensor to all others.

    Args:
        tensors: By device, of equal shapes.
        devices: Their full names.
        kind: As what the transfers are recorded.
        rows: The size of the first axis if it is not static.
    """
    ways, width = len(devices), tensors[0].shape[-1] if tensors[0].shape.rank else None
    if ways == 2 or width is None or width % ways:
        return _for_each(devices, kind, rows, list(tensors), tf.add_n)
    slices = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            slices.append(tf.split(tensor, ways, -1))
    partial = []
    for index, device in enumerate(devices):
        received = [of_device[index] for of_device in slices]
        record_transfer(kind, received, device, rows=rows)
        with tf.device(device):
            partial.append(tf.add_n(received))
    return _for_each(devices, kind, rows, partial, lambda sums: tf.concat(sums, -1))


def gathered_from_shards(tensors: Sequence[tf.Tensor], devices: Sequence[str], kind: str, rows: Any) -> list[tf.Tensor]:
    """Returns for each device the tensors of all, stacked along a new first axis. Arguments: `summed_over_shards`."""
    return _for_each(devices, kind, rows, list(tensors), tf.stack)


def _for_each(
    devices: Sequence[str], kind: str, rows: Any, sent: list[tf.Tensor], combine: Callable[..., tf.Tensor]
) -> list[tf.Tensor]:
    results = []
    for device in devices:
        record_transfer(kind, sent, device, rows=rows)
        with tf.device(device):
            results.append(combine(sent))
    return results


# Without one of these a remainder takes no longer than the call of a function.
_COSTLY = frozenset(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "UnsortedSegmentSum"))


def urgent_first(graph: Any, definition: Any, part: Any, sent: str) -> list[Any]:
    """Returns what a sent tensor needs as one function, and the rest of a part as another one.

    Args:
        graph: The graph of the traced function.
        definition: Its `tf.compat.v1.GraphDef`.
        part: One of its parts, before an exchange; or None.
        sent: The name of the tensor that the exchange sends.

    Returns:
        The functions in the order of their calls; the part alone if there is no costly rest.
    """
    if part is None or sent not in part.outputs:
        return [part]
    inner = part.operations
    own = [one for one in graph.get_operations() if one.name in inner]
    given = set(part.inputs)
    depends: set[str] = set()
    for one in own:  # the others depend on constants alone
        if any(tensor.name in given or tensor.op.name in depends for tensor in one.inputs):
            depends.add(one.name)
    first = _needed([graph.get_tensor_by_name(sent).op], inner, given)
    rest = [one for one in own if one.name in depends and one.name not in first]
    if not any(one.type in _COSTLY for one in rest):
        return [part]
    later = {one.name for one in rest}
    constants = _needed(
        [tensor.op for one in rest for tensor in one.inputs if tensor.op.name not in depends], inner, given
    )
    kept = [one for one in own if one.name not in later]  # also what nothing needs, such as prints
    passed = {tensor.name for one in rest for tensor in one.inputs if tensor.op.name in depends - later}
    wanted = {*part.outputs, *passed}
    return [
        part_of(definition, {one.name for one in kept}, _inputs(kept, given), _results(kept, wanted)),
        part_of(definition, later | constants, _inputs(rest, given | passed), _results(rest, wanted)),
    ]


def _needed(operations: Sequence[Any], inner: Collection[str], given: Collection[str]) -> set[str]:
    """Returns the names of `operations`, and of those in `inner` whose data they need."""
    found, waiting = set(), list(operations)
    while waiting:
        one = waiting.pop()
        if one.name in inner and one.name not in found:
            found.add(one.name)
            waiting += [tensor.op for tensor in one.inputs if tensor.name not in given]
    return found


def _inputs(operations: Sequence[Any], given: Collection[str]) -> list[tf.Tensor]:
    return list({one.name: one for operation in operations for one in operation.inputs if one.name in given}.values())


def _results(operations: Sequence[Any], wanted: Collection[str]) -> list[tf.Tensor]:
    return [tensor for operation in operations for tensor in operation.outputs if tensor.name in wanted]
