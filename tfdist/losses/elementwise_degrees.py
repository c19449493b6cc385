"""Operations that compute values of elements: sums, products, powers and other functions."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.losses.sample_axes import Rule, grows, static, vector
from tfdist.losses.sample_kinds import (
    Kind,
    function_of,
    mean_over_samples,
    power_of,
    product_of,
    quotient_of,
    sum_of,
    unknown,
)

PRODUCTS = frozenset({"Mul", "MulNoNan"})
DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan", "FloorDiv"})
_LINEAR = "Identity Neg StopGradient PreventGradient CheckNumerics Snapshot EnsureShape ReadVariableOp".split()
_SCALING = "Abs Relu LeakyRelu".split()  # f(c x) = c f(x) for c > 0
_SUMS = "AddV2 Add Sub AddN BiasAdd".split()
_SELECTIONS = "Maximum Minimum".split()
_GUARDS: dict[str, Callable[..., Any]] = {"AddV2": tf.add, "Maximum": tf.maximum}
# The second operand is the gradient, and the result is linear in it.
_GRADIENTS = (
    "TanhGrad SigmoidGrad SqrtGrad RsqrtGrad InvGrad ReciprocalGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad".split()
)
_GRADIENTS_FIRST = "ReluGrad Relu6Grad LeakyReluGrad".split()
_FUNCTIONS = (
    "Exp Expm1 Log Log1p Sigmoid Tanh Sin Cos Tan Asin Acos Atan Atan2 Sinh Cosh Erf Erfc Erfinv Ndtri Lgamma Digamma "
    "Elu Selu Relu6 Softplus Softsign Sign Floor Ceil Round Rint Mod FloorMod TruncateMod Xlogy Xdivy Xlog1py "
    "Greater GreaterEqual Less LessEqual Equal NotEqual ApproximateEqual LogicalAnd LogicalOr LogicalNot IsNan IsInf "
    "IsFinite ClipByValue NextAfter BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift Igamma Igammac Zeta Betainc "
    "Polygamma Quantize Dequantize Bitcast StringLower AsString".split()
)
_OF_LAST_AXIS = "Softmax LogSoftmax TopKV2 TopK FFT IFFT RFFT IRFFT SoftmaxCrossEntropyWithLogits".split()


def aligned(tensor: tf.Tensor, kinds: Sequence[Kind]) -> frozenset[int]:
    """Returns the axes of the samples after broadcasting."""
    rank, axes = tensor.shape.rank, set()
    for operand, kind in zip(tensor.op.inputs, kinds, strict=True):
        operand_rank = operand.shape.rank
        axes |= {axis + (0 if rank is None or operand_rank is None else rank - operand_rank) for axis in kind.axes}
    return frozenset(axes)


def product(degrees: Any, tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """A product or a quotient. A literal of the replica's number of samples, or of its multiple, is ambiguous."""
    operation, axes = tensor.op, aligned(tensor, kinds)
    if kinds[0].sizes is not None or kinds[1].sizes is not None:
        return _product_of_vectors(tensor, kinds)
    is_division = operation.type in DIVISIONS
    is_half = operation.type == "FloorDiv" and tf.get_static_value(operation.inputs[1]) not in (None, 1)
    if is_half and grows(kinds[0].degree):  # The remainder matters; sizes that TensorFlow divides have none.
        return unknown(kinds, axes)
    if is_division:
        divisor, _ = without_guard(operation.inputs[1])
        kinds = [kinds[0], kinds[1] if kinds[1].degree is not None else degrees.kind(divisor)]
    result_kind = quotient_of(kinds[0], kinds[1], operation.inputs[1], axes) if is_division else product_of(kinds, axes)
    sums = [kind for kind in kinds[: 1 if is_division else 2] if kind.is_reduced and kind.degree == 1]
    factors = [
        _ratio_to_samples(operand, degrees.static_samples, is_division=is_division)
        for operand, kind in zip(operation.inputs, kinds, strict=True)
        if kind.is_constant or kind.replicas
    ]
    ratio = next((factor for factor in factors if factor), None)
    is_global = ratio == degrees.replicas > 1  # the number of samples of the global batch
    if not sums or result_kind.degree != 1 or ratio is None or is_global:
        return result_kind
    if not any(ambiguous is tensor for ambiguous in degrees.ambiguous):
        degrees.ambiguous.append(tensor)
    # The quotient is a mean if the literal is the number of the replica's samples, whatever it was computed from.
    return dataclasses.replace(result_kind, degree=0, replicas=0) if ratio == 1 else result_kind


def without_guard(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any] | None]:
    """Returns a divisor without what guards against a division by 0, and the function that guards another value.

    Such a divisor is `tf.maximum(total, 1.0)` or `total + 1e-8`.
    """
    operation = tensor.op
    if operation.type not in _GUARDS or tensor.shape.rank != 0:
        return tensor, None
    values = [tf.get_static_value(operand) for operand in operation.inputs]
    if all(value is None for value in values):
        return tensor, None
    place = 0 if values[0] is not None else 1
    guard, least = _GUARDS[operation.type], values[place]
    return operation.inputs[1 - place], lambda total: guard(total, tf.cast(least, total.dtype))


def _ratio_to_samples(tensor: Any, samples: int | None, *, is_division: bool) -> int | None:
    """Returns how often a literal divisor contains the number of samples, or the inverse of a literal factor."""
    value = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
    if value is None or not samples or not np.isfinite(value) or value <= 0:
        return None
    divisor = float(value) if is_division else 1 / float(value)
    ratio = divisor / samples
    if ratio < 0.5 or not math.isclose(ratio, round(ratio), rel_tol=1e-6):
        return None
    is_weight = not is_division and round(ratio) > 1 and math.isclose(float(value), float(f"{value:.2g}"), rel_tol=1e-6)
    return None if is_weight else round(ratio)  # A factor such as 0.05 is a weight, not 1/20.


def _product_of_vectors(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    sign = -1 if tensor.op.type in DIVISIONS else 1
    length = max(len(kind.sizes or ()) for kind in kinds)
    rows = [
        kind.sizes if kind.sizes is not None and len(kind.sizes) == length else (kind.degree,) * length
        for kind in kinds
    ]
    if any(kind.sizes is not None and len(kind.sizes) not in (1, length) for kind in kinds):
        return unknown(kinds)
    pairs = zip(*rows, strict=True)
    return vector([None if None in pair else sum([pair[0] or 0, sign * (pair[1] or 0)]) for pair in pairs])


def _linear(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return kinds[0] if tensor.op.type != "ReadVariableOp" else Kind(is_trained=True)


def _scaling(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return unknown(kinds, kinds[0].axes) if kinds[0].is_reduced else kinds[0]


def _cast(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    is_rounding = tensor.op.inputs[0].dtype.is_floating and not tensor.dtype.is_floating
    return _function(tensor, kinds) if is_rounding or tensor.dtype == tf.bool else kinds[0]


def _sum(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    if any(kind.sizes is not None for kind in kinds):
        # Nothing is known of the sums of sizes, but of as many: the place of one names the axis that it becomes.
        unknown_sizes = vector([None] * (tensor.shape.num_elements() or 1))
        return unknown_sizes if any(not kind.is_constant for kind in kinds) else Kind()
    return sum_of(kinds, aligned(tensor, kinds))


def _selection(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    axes = aligned(tensor, kinds)
    selected = sum_of(kinds, axes)
    return unknown(kinds, axes) if selected.is_reduced else selected


def _select(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    axes = aligned(tensor, kinds)
    if not (kinds[0].is_constant or (kinds[0].axes and kinds[0].degree == 0 and not kinds[0].is_reduced)):
        return unknown(kinds, axes)
    selected = sum_of(kinds[1:], axes)
    return unknown(kinds, axes) if selected.is_reduced and kinds[0].axes else selected


def _function(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return function_of([kind for kind in kinds if kind.sizes is None or not kind.is_constant], aligned(tensor, kinds))


def _gradient(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    values, gradients = (kinds[1], kinds[0]) if tensor.op.type in _GRADIENTS_FIRST else (kinds[0], kinds[1])
    axes = aligned(tensor, kinds)
    return product_of([function_of([values], values.axes), gradients], axes)


def _of_last_axis(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    rank, axes = tensor.op.inputs[0].shape.rank, aligned(tensor, kinds) if tensor.shape.rank else frozenset()
    used = kinds[:1] if tensor.op.type.startswith("TopK") else kinds
    if rank is None or any(rank - 1 in kind.axes for kind in used):
        return unknown(kinds, kinds[0].axes)
    return function_of(used, kinds[0].axes or axes)


def _of_labels(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """The cross-entropy of rows of logits, and its gradient."""
    if 1 in kinds[0].axes:
        return unknown(kinds, kinds[0].axes)
    return function_of(kinds, kinds[0].axes | kinds[1].axes)


def _of_alignments(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """The CTC losses of samples, whose logits lie along axis 1, or their gradient. Labels are sparse."""
    return function_of(kinds[:1], {tensor.value_index}) if kinds[0].axes == {1} else unknown(kinds)


def _place_of_largest(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    dimension, rank = static(tensor.op.inputs[1]), tensor.op.inputs[0].shape.rank
    if not kinds[0].axes:
        return function_of(kinds[:1])
    if dimension is None or rank is None or int(dimension.ravel()[0]) % rank in kinds[0].axes:
        return unknown(kinds)
    gone = int(dimension.ravel()[0]) % rank
    return function_of(kinds[:1], [axis - (axis > gone) for axis in kinds[0].axes])


def _squared(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    return power_of(sum_of(kinds, aligned(tensor, kinds)), 2)


def _power(exponent: float) -> Callable[[tf.Tensor, Sequence[Kind]], Kind]:
    return lambda tensor, kinds: power_of(kinds[0], exponent)


def _to_the_power(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    exponent = tf.get_static_value(tensor.op.inputs[1])
    if exponent is not None and np.size(exponent) == 1:
        return power_of(kinds[0], float(np.ravel(exponent)[0]))
    return _function(tensor, kinds)


def _half_of_squares(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    squares = power_of(kinds[0], 2)
    return mean_over_samples(squares, is_sum=True) if kinds[0].axes else squares


RULES: dict[str, Rule] = {
    **dict.fromkeys(_LINEAR, _linear),
    "IdentityN": lambda tensor, kinds: kinds[tensor.value_index],
    **dict.fromkeys(_SCALING, _scaling),
    "Cast": _cast,
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_SELECTIONS, _selection),
    "SelectV2": _select,
    "Select": _select,
    **dict.fromkeys(_FUNCTIONS, _function),
    **dict.fromkeys(_GRADIENTS, _gradient),
    **dict.fromkeys(_GRADIENTS_FIRST, _gradient),
    **dict.fromkeys(_OF_LAST_AXIS, _of_last_axis),
    "SparseSoftmaxCrossEntropyWithLogits": _of_labels,
    **dict.fromkeys(("CTCLoss", "CTCLossV2"), _of_alignments),
    **dict.fromkeys(("ArgMax", "ArgMin"), _place_of_largest),
    "SquaredDifference": _squared,
    "Square": _power(2),
    "Sqrt": _power(0.5),
    "Rsqrt": _power(-0.5),
    "Reciprocal": _power(-1),
    "Inv": _power(-1),
    "Pow": _to_the_power,
    "L2Loss": _half_of_squares,
}
