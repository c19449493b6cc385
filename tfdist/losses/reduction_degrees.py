"""Operations that reduce axes, products of matrices and kernels, and operations that make or use a shape."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.losses.sample_axes import Rule, grows, is_whole, static, vector
from tfdist.losses.sample_kinds import ZERO, Kind, function_of, mean_over_samples, product_of, unknown

RANDOM = frozenset(
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal StatelessRandomNormalV2 "
    "StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessTruncatedNormalV2 StatelessRandomNormal "
    "StatelessRandomUniform StatelessRandomUniformInt StatelessTruncatedNormal RandomGammaV2 "
    "StatelessRandomUniformFullIntV2".split()
)
_KERNEL_GRADIENTS = (
    "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter Conv2DBackpropFilterV2".split()
)
_INPUT_GRADIENTS = (
    "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput Conv2DBackpropInputV2".split()
)
_CONVOLUTIONS = "Conv2D Conv3D DepthwiseConv2dNative".split()


def _reduction(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    operation, kind = tensor.op, kinds[0]
    if operation.type == "Prod" and kind.sizes is not None:
        sizes = [size for size in kind.sizes if size != ZERO]
        return unknown(kinds) if None in sizes else Kind(degree=sum(size or 0 for size in sizes))
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


def _contracted(
    tensor: tf.Tensor, kinds: Sequence[Kind], contracted: Sequence[int | None], outputs: Sequence[dict[int, int]]
) -> Kind:
    """The kind of a sum over axes of two operands.

    Args:
        tensor: The result.
        kinds: The kinds of the operands.
        contracted: For each operand, the label of the axis of its samples if the sum is over it, else `None`.
        outputs: For each operand, the axis of the result that each of its other axes becomes.
    """
    axes = {output[axis] for kind, output in zip(kinds, outputs, strict=True) for axis in kind.axes if axis in output}
    if any(len(kind.axes) > 1 for kind in kinds) or len(axes) > 1:
        return unknown(kinds, axes)
    if all(label is None for label in contracted):
        return product_of(kinds, axes)
    if contracted[0] == contracted[1] and not axes:
        return product_of(kinds, is_sum=True)
    return unknown(kinds, axes)


def _matrices(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    operation = tensor.op
    first, second = operation.inputs[:2]
    rank = tensor.shape.rank
    if rank is None or first.shape.rank is None or second.shape.rank is None:
        return unknown(kinds, [0]) if any(kind.axes for kind in kinds) else product_of(kinds)
    names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    flips = [operation.get_attr(name) for name in names]
    outputs, inner = [], []
    for factor, flip, is_second in zip((first, second), flips, (False, True), strict=True):
        factor_rank = factor.shape.rank
        rows, columns = (factor_rank - 1, factor_rank - 2) if flip else (factor_rank - 2, factor_rank - 1)
        kept_axis, summed_axis = (columns, rows) if is_second else (rows, columns)
        places = {axis: rank - factor_rank + axis for axis in range(factor_rank - 2)}
        outputs.append({**places, kept_axis: rank - 1 if is_second else rank - 2})
        inner.append(summed_axis)
    labels = [0 if axis in kind.axes else None for axis, kind in zip(inner, kinds, strict=True)]
    return _contracted(tensor, kinds[:2], labels, outputs)


def _einsum(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    left, _, right = tensor.op.get_attr("equation").decode().replace(" ", "").partition("->")
    terms = left.split(",")
    if not any(kind.axes for kind in kinds):
        return product_of(kinds)
    if "." in left or len(terms) != len(kinds) or any(len(kind.axes) > 1 for kind in kinds):
        ellipsis = all(term.startswith("...") for term in [*terms, right]) and all(kind.axes <= {0} for kind in kinds)
        return product_of(kinds, {0}) if ellipsis else unknown(kinds, [0])
    if len(kinds) == 1:
        (axis,) = kinds[0].axes
        label = terms[0][axis]
        is_plain = len(set(terms[0])) == len(terms[0])
        if label in right:
            return product_of(kinds, {right.index(label)}) if is_plain else unknown(kinds, [0])
        return unknown(kinds)
    labels = [term[next(iter(kind.axes))] if kind.axes else None for term, kind in zip(terms, kinds, strict=True)]
    outputs = [{place: right.index(label) for place, label in enumerate(term) if label in right} for term in terms]
    is_plain = all(len(set(term)) == len(term) for term in terms)
    if not is_plain:
        return unknown(kinds)
    contracted = [None if label is None or label in right else ord(label) for label in labels]
    return _contracted(tensor, kinds, contracted, outputs)


def _convolution(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    if kinds[0].axes == {0}:
        return product_of(kinds, {0})
    return unknown(kinds) if any(kind.axes for kind in kinds) else product_of(kinds)


def _gradient_of_input(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    kernel, gradient = kinds[1], kinds[2]
    return product_of([kernel, gradient], gradient.axes) if gradient.axes <= {0} else unknown(kinds)


def _gradient_of_kernel(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    values, gradient = kinds[0], kinds[2]
    if values.axes == gradient.axes == {0}:
        return product_of([values, gradient], is_sum=True)
    return unknown(kinds) if values.axes or gradient.axes else product_of([values, gradient])


def _gradient_of_bias(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return product_of([kinds[0], Kind(kinds[0].axes)], is_sum=True) if kinds[0].axes else kinds[0]


def _batch_normalization(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """Normalized samples count as values of the samples: their statistics are those of a replica, or synchronized."""
    if tensor.value_index:
        return unknown(kinds) if kinds[0].axes else function_of(kinds)
    return function_of(kinds, kinds[0].axes)


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
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matrices),
    "Einsum": _einsum,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_INPUT_GRADIENTS, _gradient_of_input),
    **dict.fromkeys(_KERNEL_GRADIENTS, _gradient_of_kernel),
    "BiasAddGrad": _gradient_of_bias,
    **dict.fromkeys(("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm"), _batch_normalization),
}
