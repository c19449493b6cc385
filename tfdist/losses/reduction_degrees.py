"""Operations that reduce axes, and those that make or use a shape: sizes, ranges, noise."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.losses.sample_axes import Rule, grows, is_whole, static, vector
from tfdist.losses.sample_kinds import ZERO, Kind, function_of, mean_over_samples, unknown

_RANDOM = (
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal StatelessRandomNormalV2 "
    "StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessTruncatedNormalV2 StatelessRandomNormal "
    "StatelessRandomUniform StatelessRandomUniformInt StatelessTruncatedNormal RandomGammaV2 "
    "StatelessRandomUniformFullIntV2".split()
)


def _reduction(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    operation, kind = tensor.op, kinds[0]
    if operation.type == "Prod" and kind.sizes is not None:
        return (
            unknown(kinds) if None in kind.sizes else Kind(degree=sum(size or 0 for size in kind.sizes if size != ZERO))
        )
    is_linear = operation.type in ("Sum", "Mean")
    rank, axes = operation.inputs[0].shape.rank, static(operation.inputs[1])
    if operation.inputs[1].op.type == "BroadcastGradientArgs":
        return kind  # A `Reshape` to the operand's shape follows.
    if not kind.axes:
        if is_linear:
            return kind
        return _of_largest(kind) if operation.type in ("Max", "Min") else function_of(kinds[:1])
    if tensor.shape.rank == 0:
        reduced = kind.axes if rank is None else frozenset(range(rank))
    elif axes is None or rank is None or None in axes.ravel():
        return unknown(kinds, [0])
    else:
        reduced = frozenset(int(axis) % rank for axis in axes.ravel())
    keeps = operation.get_attr("keep_dims")
    left = [axis if keeps else axis - sum(1 for gone in reduced if gone < axis) for axis in kind.axes - reduced]
    if reduced & kind.axes:
        return mean_over_samples(kind, left, is_sum=operation.type == "Sum") if is_linear else unknown(kinds, left)
    if is_linear:
        return kind.at(left)
    result_kind = _of_largest(kind) if operation.type in ("Max", "Min") else function_of(kinds[:1], kind.axes)
    return result_kind.at(left)


def _of_largest(kind: Kind) -> Kind:
    return unknown([kind], kind.axes) if kind.is_reduced else kind


def _shape(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    index = tensor.value_index
    rank = tensor.op.inputs[index].shape.rank
    if rank is None:
        return unknown() if kinds[index].axes else Kind()
    return vector([int(axis in kinds[index].axes) for axis in range(rank)])


def _size(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return Kind(degree=len(kinds[0].axes))


def _fill(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    axes = [axis for axis, size in enumerate(kinds[0].sizes or ()) if grows(size)]
    if len(axes) > 1 or (kinds[0].sizes is None and kinds[0].degree is None):
        return unknown(kinds, axes)
    return kinds[1].at(axes, 0)


def _range(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    if any(kind.degree is None for kind in kinds):
        return unknown(kinds, [0])
    return Kind(frozenset({0}) if any(grows(kind.degree) for kind in kinds) else frozenset())


def _one_hot(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    axis, rank = tensor.op.get_attr("axis"), tensor.shape.rank or 1
    new = axis % rank
    return function_of(kinds[:1], [sample_axis + (sample_axis >= new) for sample_axis in kinds[0].axes])


def random(degrees: Any, tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """Noise of a shape. A first axis of as many rows as there are samples holds samples."""
    sizes, shape = kinds[0].sizes, static(tensor.op.inputs[0])
    axes = [axis for axis, size in enumerate(sizes or ()) if grows(size)]
    if not axes and sizes is not None and shape is not None and len(shape) and degrees.static_samples:
        axes = [0] if shape[0] is not None and is_whole(int(shape[0]), degrees.static_samples) else []
    if len(axes) > 1 or sizes is None:
        return unknown(kinds, axes)
    return Kind(frozenset(axes), blocks=0) if axes else function_of([Kind(), *kinds[1:]])


RANDOM = frozenset(_RANDOM)
RULES: dict[str, Rule] = {
    **dict.fromkeys("Sum Mean Max Min Prod All Any EuclideanNorm".split(), _reduction),
    "Shape": _shape,
    "ShapeN": _shape,
    "Size": _size,
    "Rank": lambda tensor, kinds: Kind(),
    "BroadcastGradientArgs": lambda tensor, kinds: Kind(),
    "Fill": _fill,
    "ZerosLike": lambda tensor, kinds: Kind(kinds[0].axes, ZERO, blocks=kinds[0].blocks),
    "OnesLike": lambda tensor, kinds: Kind(kinds[0].axes, blocks=kinds[0].blocks),
    "Range": _range,
    "OneHot": _one_hot,
}
