"""How the tensors of a traced step depend on the number of samples: which are means over them, and which are sums.

A tensor has the *degree* 0 if it keeps its size when a replica has more samples of the same kind (a mean, a weight of
the model), and 1 if it grows with their number (a sum over the samples, a part of a loss). Replicas add values of
degree 1, and average values of degree 0.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

ZERO = math.inf  # The degree of the constant 0, which has every degree.

_LINEAR = frozenset(
    "Identity IdentityN Cast Neg Abs Relu LeakyRelu StopGradient PreventGradient CheckNumerics Reshape Squeeze "
    "ExpandDims Slice StridedSlice GatherV2 GatherNd Transpose BroadcastTo Tile Max Min Mean Snapshot EnsureShape "
    "PadV2 Pad Split SplitV Unpack".split()
)
_OF_EQUAL_DEGREES = frozenset("AddV2 Add Sub AddN BiasAdd Maximum Minimum Pack ConcatV2".split())
_PRODUCTS = frozenset({"Mul", "MulNoNan"})
_QUOTIENTS = frozenset({"RealDiv", "Div", "DivNoNan", "FloorDiv"})
_REDUCTIONS = frozenset("Sum Mean Max Min Prod All Any".split())
_BROADCASTING = (
    _OF_EQUAL_DEGREES - {"Pack", "ConcatV2"} | _PRODUCTS | _QUOTIENTS | {"SquaredDifference", "Pow", "SelectV2"}
)


@dataclass(frozen=True)
class Kind:
    """What is known of a tensor.

    Attributes:
        axes: The axes along which the samples lie.
        degree: Of its elements, by which they grow with the number of samples; `None` if unknown.
        shape_axes: If the tensor is the shape of another one, that one's `axes`.
    """

    axes: frozenset[int] = frozenset()
    degree: float | None = 0
    shape_axes: frozenset[int] = frozenset()


class SampleDegrees:
    """Finds the kinds of tensors in the graph of one replica's step."""

    def __init__(self, data: Any, samples: int | tf.Tensor) -> None:
        """Prepares for a step.

        Args:
            data: The replica's batch, a structure of tensors whose first axis holds the samples.
            samples: The replica's number of samples, an int or an int32 scalar.
        """
        self._static = samples if isinstance(samples, int) else None
        self._kinds: dict[Any, Kind] = {}
        self._graphs = set()
        for leaf in tf.nest.flatten(data, expand_composites=True):
            if is_symbolic(leaf):
                self._graphs.add(leaf.graph)
                self._kinds[leaf.ref()] = Kind(frozenset({0}) if leaf.shape.rank != 0 else frozenset())
        if is_symbolic(samples):
            self.mark(samples, 1)

    def mark(self, tensor: Any, degree: float) -> None:
        """Sets the `degree` of a tensor, and so of those that are computed from it. Eager tensors are ignored."""
        if is_symbolic(tensor):
            kind = Kind() if tensor.shape.rank == 0 else self.kind(tensor)
            self._kinds[tensor.ref()] = replace(kind, degree=degree - bool(kind.axes))

    def degree(self, tensor: Any) -> float | None:
        """Returns the degree of the sum of a tensor's elements over the samples; `None` if unknown.

        That sum is what a gradient tape differentiates.
        """
        kind = self.kind(tensor)
        return kind.degree if not kind.axes or kind.degree in (None, ZERO) else kind.degree + 1

    def kind(self, tensor: Any) -> Kind:
        """Returns the kind of a symbolic tensor."""
        waiting = [tensor]
        while waiting:
            top = waiting[-1]
            if top.ref() in self._kinds:
                waiting.pop()
                continue
            unknown = [given for given in top.op.inputs if given.ref() not in self._kinds]
            if unknown:
                waiting += unknown
                continue
            self._kinds[top.ref()] = self._of(top)
            waiting.pop()
        return self._kinds[tensor.ref()]

    def _of(self, tensor: tf.Tensor) -> Kind:
        operation = tensor.op
        kinds = [self._kinds[given.ref()] for given in operation.inputs]
        if operation.type == "IdentityN":
            return kinds[tensor.value_index]
        if operation.type == "Const":
            return self._of_constant(tensor)
        if operation.type == "Placeholder" and tensor.graph not in self._graphs:  # an argument of a nested function
            return Kind(frozenset({0}) if tensor.shape.rank and self._may_be_samples(tensor.shape[0]) else frozenset())
        if operation.type in _REDUCTIONS:
            return self._of_reduction(tensor, kinds[0])
        if operation.type == "Shape":
            return Kind(shape_axes=kinds[0].axes)
        if operation.type == "Size":
            return Kind(degree=1 if kinds[0].axes else 0)
        if operation.type in ("StridedSlice", "GatherV2") and kinds[0].shape_axes:
            places = tf.get_static_value(operation.inputs[1])
            is_samples = places is None or any(int(place) in kinds[0].shape_axes for place in places.ravel())
            if operation.type == "GatherV2" and tensor.shape.rank != 0:
                return Kind(shape_axes=kinds[0].shape_axes if is_samples else frozenset())
            return Kind(degree=1 if is_samples else 0)
        axes = self._axes(tensor, kinds)
        if operation.type in ("ZerosLike", "Fill"):
            filler = tf.get_static_value(operation.inputs[-1]) if operation.type == "Fill" else np.zeros(())
            return Kind(axes, ZERO if filler is not None and not filler.any() else 0)
        if tensor.dtype.is_floating and not axes and any(kind.axes for kind in kinds):
            return Kind(degree=self._of_contraction(operation, kinds))
        return Kind(axes, self._degree(tensor, kinds), self._shape_axes(operation, kinds))

    @staticmethod
    def _of_contraction(operation: Any, kinds: list[Kind]) -> float | None:
        """The degree where the samples' axis disappears: `None` if an operation is not known to add them up."""
        if operation.type == "L2Loss":
            return _total([kinds[0].degree, kinds[0].degree, 1])
        if operation.type == "MatMul" and operation.get_attr("transpose_a") and 0 in kinds[0].axes & kinds[1].axes:
            return _total([kinds[0].degree, kinds[1].degree, 1])
        return None

    def _degree(self, tensor: tf.Tensor, kinds: list[Kind]) -> float | None:
        operation, degrees = tensor.op, [kind.degree for kind in kinds]
        if operation.type in ("SelectV2", "Select"):
            return _common(degrees[1:])
        if operation.type in _LINEAR:
            return degrees[0] if operation.type != "Split" else degrees[1]
        if operation.type in _OF_EQUAL_DEGREES:
            return _common(degrees[:-1] if operation.type == "ConcatV2" else degrees)
        if operation.type in _PRODUCTS:
            total = _total(degrees)
            inverse = any(self._is_samples(given, inverse=True) for given in operation.inputs)
            return total - 1 if inverse and total in (1, 2) else total
        if operation.type in _QUOTIENTS:
            if degrees[0] == 1 and self._is_samples(operation.inputs[1]):
                return 0
            return _total([degrees[0], None if degrees[1] is None else -degrees[1]])
        if operation.type in ("Square", "SquaredDifference", "L2Loss"):
            common = _common(degrees)
            return common if common in (None, ZERO) else 2 * common
        if operation.type == "Sqrt":
            return degrees[0] if degrees[0] in (None, ZERO) else degrees[0] / 2
        # Integers decide shapes, places and seeds.
        floats = [kind for given, kind in zip(operation.inputs, kinds, strict=True) if given.dtype.is_floating]
        if any(kind.degree not in (0, ZERO) for kind in floats):
            return None
        return 0

    def _of_constant(self, tensor: tf.Tensor) -> Kind:
        value = tf.get_static_value(tensor)
        if value is None or not value.size:
            return Kind()
        # What TensorFlow returns as the shape of a tensor whose shape is static.
        name = tensor.op.name.rpartition("/")[2].rstrip("0123456789_")
        if name == "Shape" and value.ndim == 1 and self._static is not None and value[0] == self._static:
            return Kind(shape_axes=frozenset({0}))
        if name == "Size" and self._static is not None and value.ndim == 0 and value % self._static == 0:
            return Kind(degree=1)
        return Kind(degree=ZERO if value.dtype.kind in "fiu" and not value.any() else 0)

    def _of_reduction(self, tensor: tf.Tensor, kind: Kind) -> Kind:
        operation = tensor.op
        if operation.type == "Prod" and kind.shape_axes:
            return Kind(degree=1)
        rank = operation.inputs[0].shape.rank
        given = tf.get_static_value(operation.inputs[1])
        if tensor.shape.rank == 0:
            reduced = kind.axes if rank is None else frozenset(range(rank))
        elif operation.inputs[1].op.type == "BroadcastGradientArgs":
            return Kind(kind.axes, kind.degree)  # A `Reshape` to the operand's shape follows.
        elif given is None or rank is None:
            return Kind(self._axes(tensor, [kind, Kind()]), None)
        else:
            reduced = frozenset(int(axis) % rank for axis in given.ravel())
        degree = kind.degree
        if operation.type == "Sum" and reduced & kind.axes:
            degree = _total([degree, 1])
        elif operation.type not in ("Sum", "Mean") and (operation.type == "Prod" or reduced & kind.axes):
            degree = 0 if degree == 0 and not reduced & kind.axes else None
        kept = operation.get_attr("keep_dims")
        left = [axis if kept else axis - sum(1 for gone in reduced if gone < axis) for axis in kind.axes - reduced]
        return Kind(frozenset(left), degree)

    def _axes(self, tensor: tf.Tensor, kinds: list[Kind]) -> frozenset[int]:
        rank = tensor.shape.rank
        sizes = [kind for given, kind in zip(tensor.op.inputs, kinds, strict=True) if given.dtype.is_integer]
        is_sized = any(kind.degree not in (0, ZERO) for kind in sizes)  # `tf.random.normal([samples, 10])`
        if not (is_sized or any(kind.axes for kind in kinds)):
            return frozenset()
        if tensor.dtype in (tf.variant, tf.resource):  # holds tensors, as a `TensorArray` does
            return frozenset({0})
        if rank == 0:
            return frozenset()
        if rank is None:
            return frozenset({0})
        operation = tensor.op
        found: set[int] = set()
        permutation = tf.get_static_value(operation.inputs[1]) if operation.type == "Transpose" else None
        if permutation is not None:
            found = {int(list(permutation).index(axis)) for axis in kinds[0].axes}
        elif operation.type in _BROADCASTING:
            for given, kind in zip(operation.inputs, kinds, strict=True):
                found |= {axis + rank - (given.shape.rank or rank) for axis in kind.axes}
        elif operation.type == "StridedSlice" and operation.get_attr("shrink_axis_mask"):
            return self._axes_of_slice(tensor, kinds[0].axes)
        elif operation.type == "Pack":
            place = operation.get_attr("axis") % rank
            found = {axis + (axis >= place) for kind in kinds for axis in kind.axes}
        else:
            same = [kind.axes for given, kind in zip(operation.inputs, kinds, strict=True) if given.shape.rank == rank]
            found = set().union(*same)
        places = frozenset(axis for axis in found if self._may_be_samples(tensor.shape[axis]))
        likely = (axis for axis in range(rank) if self._may_be_samples(tensor.shape[axis]))
        return places or frozenset([*likely][:1])

    def _axes_of_slice(self, tensor: tf.Tensor, axes: frozenset[int]) -> frozenset[int]:
        attributes = {name: tensor.op.get_attr(f"{name}_mask") for name in ("shrink_axis", "ellipsis", "new_axis")}
        if attributes["ellipsis"] or attributes["new_axis"]:
            return frozenset(
                [axis for axis in range(tensor.shape.rank) if self._may_be_samples(tensor.shape[axis])][:1]
            )
        gone = {axis for axis in range(attributes["shrink_axis"].bit_length()) if attributes["shrink_axis"] >> axis & 1}
        return frozenset(axis - sum(1 for other in gone if other < axis) for axis in axes - gone)

    def _may_be_samples(self, size: int | None) -> bool:
        return size is None or self._static is not None and size > 0 and size % max(self._static, 1) == 0

    def _is_samples(self, tensor: tf.Tensor, *, inverse: bool = False) -> bool:
        """Whether a tensor is a constant of the replica's number of samples, or its `inverse`."""
        if self._static is None or tensor.shape.rank not in (0, None) or self._kinds[tensor.ref()].degree == 1:
            return False
        if inverse and self._static == 1:
            return False
        value = tf.get_static_value(tensor)
        wanted = 1 / self._static if inverse else self._static
        return value is not None and math.isclose(float(value), wanted, rel_tol=1e-6)

    @staticmethod
    def _shape_axes(operation: Any, kinds: list[Kind]) -> frozenset[int]:
        return kinds[0].shape_axes if kinds and operation.type in ("Identity", "Cast") else frozenset()


def is_symbolic(value: Any) -> bool:
    """Whether `value` is a dense tensor of a graph, whose origin can be followed."""
    return isinstance(value, tf.Tensor) and hasattr(value, "graph") and not hasattr(value, "numpy")


def _common(degrees: Iterable[float | None]) -> float | None:
    """The degree of a sum."""
    distinct = {degree for degree in degrees if degree != ZERO}
    return distinct.pop() if len(distinct) == 1 else None if distinct else ZERO


def _total(degrees: Iterable[float | None]) -> float | None:
    """The degree of a product."""
    found = list(degrees)
    if ZERO in found:
        return ZERO
    return None if None in found else sum(degree for degree in found if degree is not None)
