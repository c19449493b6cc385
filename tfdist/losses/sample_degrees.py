"""How the tensors of a traced step depend on the number of samples: which are means over them, and which are sums.

A tensor has the *degree* 0 if it keeps its size when a replica has more samples of the same kind (a mean, a weight of
the model), and 1 if it grows with their number (a sum over the samples, a part of a loss). Replicas add values of
degree 1, and average values of degree 0. That is right for what is linear in values of single samples, so of anything
else the degree is unknown.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.losses import (
    elementwise_degrees,
    reduction_degrees,
    sample_axes,
)
from tfdist.losses.replica_count import power_of_count
from tfdist.losses.sample_axes import Rule, grows, is_whole
from tfdist.losses.sample_kinds import ZERO, Kind, function_of, product_of, sum_of, unknown
from tfdist.tensorflow_internals.function_graphs import CONDITIONS, LOOPS, PLAIN_CALLS, called_graph, is_symbolic

_CALLS = PLAIN_CALLS | CONDITIONS | LOOPS
_MOST_TURNS = 4  # After these, the kinds of a loop's values are unknown if they still change.


def _of_call(degrees: Any, operation: tf.Operation, kinds: Sequence[Kind]) -> Callable[[tf.Tensor], Kind]:
    """Follows a call, a condition or a loop (`_CALLS`); returns a function that returns the kind of an output."""
    if operation.type in LOOPS:
        return _of_loop(degrees, operation, kinds)
    if operation.type in PLAIN_CALLS:
        return _called(degrees, operation, "f", kinds)
    if not kinds[0].is_constant:
        return lambda output: unknown(kinds, kinds[0].axes)
    branches = [_called(degrees, operation, name, kinds[1:]) for name in ("then_branch", "else_branch")]

    def of_condition(output: tf.Tensor) -> Kind:
        either, other = (branch(output) for branch in branches)
        if either.axes != other.axes:
            return unknown([either, other], either.axes | other.axes)
        return sum_of([either, other], either.axes)

    return of_condition


def _of_loop(degrees: Any, operation: tf.Operation, kinds: Sequence[Kind]) -> Callable[[tf.Tensor], Kind]:
    """A loop's values have the kinds that one more turn does not change."""
    state = list(kinds)
    for _ in range(_MOST_TURNS):
        condition = _called(degrees, operation, "cond", state)(None)
        if not (condition.is_fixed or condition.is_constant):
            return lambda output: unknown(kinds, output.shape.rank and [0] or ())
        body = _called(degrees, operation, "body", state)
        joined = [_joined(before, body(output)) for before, output in zip(state, operation.outputs, strict=True)]
        if joined == state:
            return lambda output: state[output.value_index]
        state = joined
    return lambda output: unknown(kinds, [0])


def _joined(before: Kind, after: Kind) -> Kind:
    if before == after:
        return before
    if before.degree == ZERO and not before.is_reduced and (not before.axes or before.axes == after.axes):
        return dataclasses.replace(after, is_trained=before.is_trained or after.is_trained, sizes=None)
    if before.axes != after.axes or before.is_reduced != after.is_reduced:
        return unknown([before, after], before.axes | after.axes)
    return sum_of([before, after], before.axes)


def _called(degrees: Any, operation: tf.Operation, name: str, kinds: Sequence[Kind]) -> Callable[[Any], Kind]:
    """Follows the function in the attribute `name`; the result maps outputs to kinds, `None` to that of the first."""
    graph = called_graph(operation.graph, operation.get_attr(name).name)
    if graph is None or len(graph.inputs) != len(kinds):
        return lambda output: unknown(kinds, [0])
    within = degrees.nested(graph.inputs, kinds)

    def of_output(output: tf.Tensor | None) -> Kind:
        result = within.kind(graph.outputs[0 if output is None else output.value_index])
        return result if result.divisor is None else unknown(kinds)

    return of_output


def _empty_list(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """A list counts as the tensor that stacks its elements."""
    is_of_samples = any(grows(kind.degree) for kind in kinds if kind.sizes is None)
    return Kind(frozenset({0}) if is_of_samples else frozenset(), ZERO)


def _list_of_rows(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return kinds[0]


def _with_element(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    element = kinds[-1].at(axis + 1 for axis in kinds[-1].axes)
    if 0 in kinds[0].axes or (kinds[0].axes and element.axes and kinds[0].axes != element.axes):
        return unknown(kinds, kinds[0].axes)
    return sum_of([kinds[0], element], kinds[0].axes | element.axes)


def _element(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """One sample's values in a loop over the samples are unknown, because the loop may add them up."""
    if 0 in kinds[0].axes:
        return unknown(kinds)
    return kinds[0].at(axis - 1 for axis in kinds[0].axes)


def _length(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return Kind(degree=1 if 0 in kinds[0].axes else 0)


_RULES_OF_LISTS: dict[str, Rule] = {
    "TensorListReserve": _empty_list,
    "EmptyTensorList": _empty_list,
    "TensorListFromTensor": _list_of_rows,
    "TensorListStack": _list_of_rows,
    "TensorListSetItem": _with_element,
    "TensorListPushBack": _with_element,
    "TensorListGetItem": _element,
    "TensorListLength": _length,
}


# Operations that compute values of one sample from others, if the samples lie along their first axis.
_MIX_SAMPLES = frozenset(
    "Where Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 DynamicPartition DynamicStitch ParallelDynamicStitch "
    "SegmentSum SegmentSumV2 SegmentMean SegmentMax SegmentMaxV2 SegmentMin SegmentMinV2 SegmentProd SegmentProdV2 "
    "UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd SparseSegmentSum SparseSegmentMean "
    "ScatterNd TensorScatterUpdate TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin GatherNd "
    "Bincount DenseBincount HistogramFixedWidth InvertPermutation CumulativeLogsumexp Cumprod MatrixInverse "
    "MatrixDeterminant Cholesky Qr Svd SelfAdjointEigV2 MatrixSolve MatrixSolveLs Cross EagerPyFunc PyFunc "
    "PyFuncStateless SparseTensorDenseMatMul SparseReduceSum SparseReorder NonMaxSuppressionV3 "
    "TensorListConcatV2".split()
)


class SampleDegrees:
    """Finds the kinds of tensors in the graph of one replica's step."""

    def __init__(self, data: Any, samples: int | tf.Tensor, replicas: int = 1) -> None:
        """Prepares for a step with a replica's batch, a structure of tensors whose first axis holds the samples."""
        self.replicas = replicas
        self.static_samples = samples if isinstance(samples, int) else None
        self.ambiguous: list[tf.Tensor] = []
        self._kinds: dict[Any, Kind] = {}
        self._calls: dict[tf.Operation, Callable[[tf.Tensor], Kind]] = {}
        self._marks: dict[Any, tuple[list[tf.Tensor] | None, Callable[[Sequence[Kind]], Kind]]] = {}
        self._scaled: set[Any] = set()
        self._leaves: list[tf.Tensor] = []
        self._graphs: set[Any] = set()
        for leaf in tf.nest.flatten(data, expand_composites=True):
            if is_symbolic(leaf):
                self._leaves.append(leaf)
                self._graphs.add(leaf.graph)
                self._kinds[leaf.ref()] = Kind(frozenset({0}) if leaf.shape.rank != 0 else frozenset())
        if is_symbolic(samples):
            self._kinds[tf.convert_to_tensor(samples).ref()] = Kind(degree=1)

    def mark(self, tensor: Any, degree: float, *, is_loss: bool = True) -> None:
        """Sets the `degree` of the sum of a tensor's elements. Eager tensors are ignored.

        If its kind is not known, samples lie along the first axis. A scalar that `is_loss` depends on the samples
        themselves, not only on their number.
        """
        if not is_symbolic(tensor):
            return
        if is_loss and degree == 1:
            self._scaled.add(tensor.ref())

        def of_scalar(_: Sequence[Kind]) -> Kind:
            return Kind(degree=degree, is_reduced=is_loss, is_trained=is_loss)

        def of_values(followed: Sequence[Kind]) -> Kind:
            axes = followed[0].axes
            return Kind(axes, degree - bool(axes), is_reduced=not axes, is_trained=True)

        self._mark(tensor, *(([], of_scalar) if tensor.shape.rank == 0 else (None, of_values)))

    def mark_samples(self, tensor: Any, like: Any) -> None:
        """Notes that each sample of a tensor is computed from the same sample of another one, `like`."""

        def of_samples(kinds: Sequence[Kind]) -> Kind:
            (kind,) = kinds
            is_known = kind.axes and kind.degree in (0, ZERO) and not kind.is_reduced
            return Kind(kind.axes, is_trained=True) if is_known else unknown([kind], kind.axes)

        if is_symbolic(tensor) and is_symbolic(like):
            self._mark(tensor, [like], of_samples)

    def _mark(self, tensor: tf.Tensor, sources: list[tf.Tensor] | None, rule: Callable[[Sequence[Kind]], Kind]) -> None:
        """Makes `rule` return the kind of a tensor from those of `sources`, or if `None` from its kind in the graph."""
        self._marks[tensor.ref()] = (sources, rule)
        known = self._kinds.pop(tensor.ref(), None)
        if known is not None and sources is None:
            self._kinds[tensor.ref()] = rule([known])

    def contains_scaled(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor was computed from a loss that was marked as a part of the loss of all replicas."""
        waiting, seen = [tensor], {tensor.ref()}
        while waiting:
            top = waiting.pop()
            if top.ref() in self._scaled:
                return True
            inputs = [input_tensor for input_tensor in self._inputs(top) if input_tensor.ref() not in seen]
            seen.update(input_tensor.ref() for input_tensor in inputs)
            waiting += inputs
        return False

    def degree(self, tensor: Any) -> float | None:
        """Returns the degree of the sum of a tensor's elements over the samples; `None` if unknown.

        That sum is what a gradient tape differentiates.
        """
        return degree_of_sum(self.kind(tensor))

    def product(self, tensor: Any, other: Any) -> tuple[float | None, int]:
        """Returns the degree of the sum of a product over the samples, and its power of the number of replicas."""
        kinds = [self.kind(factor) if is_symbolic(factor) else Kind() for factor in (tensor, other)]
        product_kind = product_of(kinds, kinds[0].axes | kinds[1].axes)
        return degree_of_sum(product_kind), product_kind.replicas

    def kind(self, tensor: Any) -> Kind:
        waiting = [tensor]
        while waiting:
            top = waiting[-1]
            if top.ref() in self._kinds:
                waiting.pop()
                continue
            sources, rule = self._marks.get(top.ref(), (None, None))
            used = self._inputs(top) if sources is None else sources
            missing = [input_tensor for input_tensor in used if input_tensor.ref() not in self._kinds]
            if missing:
                waiting += missing
                continue
            kinds = [self._followed(top)] if sources is None else [self._kinds[source.ref()] for source in sources]
            self._kinds[top.ref()] = kinds[0] if rule is None else rule(kinds)
            waiting.pop()
        return self._kinds[tensor.ref()]

    def nested(self, inputs: Sequence[tf.Tensor], kinds: Sequence[Kind]) -> "SampleDegrees":
        """Returns the `SampleDegrees` of a function that is called with inputs of these kinds."""
        of_call = SampleDegrees((), 0, self.replicas)
        of_call.static_samples, of_call.ambiguous = self.static_samples, self.ambiguous
        of_call._leaves, of_call._marks, of_call._scaled = self._leaves, self._marks, self._scaled
        of_call._kinds = {input_tensor.ref(): kind for input_tensor, kind in zip(inputs, kinds, strict=True)}
        return of_call

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        if tensor.op.type != "Placeholder":
            return list(tensor.op.inputs)
        return [
            outer for outer, inner in getattr(tensor.graph, "captures", ()) if inner is tensor and is_symbolic(outer)
        ]

    def _followed(self, tensor: tf.Tensor) -> Kind:
        try:
            return self._of(tensor)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            # An operation of another version of TensorFlow, or in an unusual form, must not end a training.
            return unknown(
                [self._kinds[input_tensor.ref()] for input_tensor in self._inputs(tensor)],
                [0] if tensor.shape.rank else [],
            )

    def _of(self, tensor: tf.Tensor) -> Kind:
        operation = tensor.op
        kinds = [self._kinds[input_tensor.ref()] for input_tensor in operation.inputs]
        if operation.type == "Placeholder":
            return self._of_argument(tensor)
        if operation.type == "Const":
            return self._of_constant(tensor)
        if operation.type == "Reshape":
            return sample_axes.reshape(self.static_samples, tensor, kinds)
        if operation.type in _RULES:
            return _RULES[operation.type](tensor, kinds)
        if operation.type in elementwise_degrees.DIVISIONS or operation.type in elementwise_degrees.PRODUCTS:
            return elementwise_degrees.product(self, tensor, kinds)
        if operation.type in _CALLS:
            if operation not in self._calls:
                self._calls[operation] = _of_call(self, operation, kinds)
            return self._calls[operation](tensor)
        if operation.type in reduction_degrees.RANDOM:
            return reduction_degrees.random(self, tensor, kinds)
        if tensor.dtype == tf.resource:
            return Kind(is_trained=True)
        return self._of_any_operation(tensor, kinds)

    def _of_argument(self, tensor: tf.Tensor) -> Kind:
        """Returns the kind of a function's argument: that of a captured tensor, of data of its shape, or unknown."""
        outer = self._inputs(tensor)
        if outer:
            return self._kinds[outer[0].ref()]
        if tensor.graph in self._graphs or tensor.dtype in (tf.resource, tf.variant, tf.string):
            return Kind(is_trained=tensor.dtype == tf.resource)
        if any(inner is tensor for _, inner in getattr(tensor.graph, "captures", ())):  # an eager tensor
            return Kind()
        shape = (tensor.dtype, str(tensor.shape))
        is_like_data = bool(tensor.shape.rank) and any((leaf.dtype, str(leaf.shape)) == shape for leaf in self._leaves)
        return Kind(frozenset({0})) if is_like_data else unknown()

    def _of_constant(self, tensor: tf.Tensor) -> Kind:
        value = tf.get_static_value(tensor)
        power = power_of_count(tensor)
        if power:
            return Kind(replicas=power)
        if value is None or not value.size:
            return Kind()
        # TensorFlow returns a static shape or size as a constant with the name of the operation.
        name = tensor.op.name.rpartition("/")[2].rstrip("0123456789_")
        samples = self.static_samples
        if value.ndim == 1 and value.dtype.kind == "i":
            whole = [
                is_whole(int(size), samples) and (place == 0 or size == samples) for place, size in enumerate(value)
            ]
            place_of_samples = whole.index(True) if samples and name == "Shape" and True in whole else None
            return sample_axes.vector([int(place == place_of_samples) for place in range(value.size)])
        if samples and name == "Size" and value.ndim == 0 and value % samples == 0:
            return Kind(degree=1)
        degree = ZERO if value.dtype.kind in "fiu" and not value.any() else 0
        is_of_tensor = name in ("ones_like", "zeros_like") or name == "ones" and _begins_gradients(tensor)
        is_like_samples = samples and is_of_tensor and value.ndim and value.shape[0] % samples == 0
        return Kind(frozenset({0}), degree, blocks=0) if is_like_samples else Kind(degree=degree)

    def _of_any_operation(self, tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
        """Layers compute each sample alone, along the first axis. The kinds of other operations are unknown."""
        operation, rank = tensor.op, tensor.shape.rank
        used = [kind for kind in kinds if kind.sizes is None]
        with_samples = [kind for kind in used if kind.axes]
        if not with_samples:
            return function_of(used)
        axes = (
            frozenset({0}) if rank is None or rank and is_whole(tensor.shape[0], self.static_samples) else frozenset()
        )
        if operation.type in _MIX_SAMPLES or not axes or any(kind.axes != {0} for kind in with_samples):
            return unknown(used, axes)
        return function_of(used, axes)


def _begins_gradients(tensor: tf.Tensor) -> bool:
    """Whether only gradients use a tensor: a tape begins with ones in the shape of what it derives."""
    return bool(tensor.consumers()) and all("gradient_tape/" in user.name for user in tensor.consumers())


def degree_of_sum(kind: Kind) -> float | None:
    """The degree of the sum of a tensor's elements; `None` also for quotients of two sums."""
    if kind.degree is None or kind.divisor is not None or len(kind.axes) > 1:
        return None
    return kind.degree if kind.degree == ZERO else kind.degree + bool(kind.axes)


_RULES: dict[str, Callable[[tf.Tensor, Sequence[Kind]], Kind]] = {
    **sample_axes.RULES,
    **elementwise_degrees.RULES,
    **reduction_degrees.RULES,
    **_RULES_OF_LISTS,
}
