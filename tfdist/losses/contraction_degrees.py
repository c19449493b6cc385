"""Products of matrices and kernels: over which axes they add up, and whether samples are among these."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.losses.sample_axes import Rule
from tfdist.losses.sample_kinds import Kind, function_of, product_of, unknown

_KERNEL_GRADIENTS = (
    "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter Conv2DBackpropFilterV2".split()
)
_INPUT_GRADIENTS = (
    "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput Conv2DBackpropInputV2".split()
)
_CONVOLUTIONS = "Conv2D Conv3D DepthwiseConv2dNative".split()


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
    contracted = [None if label is None or label in right else label for label in labels]
    return (
        _contracted(tensor, kinds, [label and ord(label) for label in contracted], outputs)
        if is_plain
        else unknown(kinds)
    )


def _convolution(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return (
        product_of(kinds, {0})
        if kinds[0].axes == {0}
        else unknown(kinds)
        if any(k.axes for k in kinds)
        else product_of(kinds)
    )


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
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matrices),
    "Einsum": _einsum,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_INPUT_GRADIENTS, _gradient_of_input),
    **dict.fromkeys(_KERNEL_GRADIENTS, _gradient_of_kernel),
    "BiasAddGrad": _gradient_of_bias,
    **dict.fromkeys(("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm"), _batch_normalization),
}
