"""Splits a loss of a traced step into terms, each a mean over the samples or a sum."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.losses.elementwise_degrees import without_guard
from tfdist.losses.sample_degrees import SampleDegrees, degree_of_sum
from tfdist.losses.sample_kinds import ZERO

_LINEAR = frozenset("Identity Neg Cast Reshape Squeeze Sum Mean".split())


@dataclasses.dataclass(frozen=True)
class Term:
    """A term of a loss: `coefficient * sum(tensor)`, divided by the `divisor` if there is one.

    Attributes:
        tensor: A tensor, whose sum counts.
        coefficient: A constant.
        degree: The degree of the sum; `None` if unknown.
        replicas: The power of the number of replicas that is a factor of the tensor.
        divisor: A sum or mean over the same samples, a scalar, that does not depend on variables.
        guard: Guards the divisor, after it is summed, against a division by 0.
    """

    tensor: tf.Tensor
    coefficient: float
    degree: float | None
    replicas: int = 0
    divisor: tf.Tensor | None = None
    guard: Callable[[Any], Any] | None = None

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over the replica's samples as it is."""
        return self.degree == 0 and not self.replicas and self.divisor is None


def loss_terms(loss: tf.Tensor, degrees: SampleDegrees) -> list[Term]:
    """Returns the terms of a loss in order. All parts of a term have one degree.

    A loss of one degree is one term. Only sums, and products with constants, are split.
    """
    terms: list[Term] = []
    waiting: list[tuple[tf.Tensor, float]] = [(loss, 1.0)]
    while waiting:
        tensor, coefficient = waiting.pop()
        kind = degrees.kind(tensor)
        degree = degree_of_sum(kind)
        if kind.divisor is not None and kind.divisor is tensor.op.inputs[-1]:
            dividend = tensor.op.inputs[0]
            is_guarded = degrees.kind(kind.divisor).degree is None
            divisor, guard = without_guard(kind.divisor) if is_guarded else (kind.divisor, None)
            terms.append(Term(dividend, coefficient, degrees.degree(dividend), divisor=divisor, guard=guard))
            continue
        parts = None if degree is not None else _parts(tensor)
        if parts is None:
            terms.append(Term(tensor, coefficient, degree, kind.replicas))
        else:
            waiting += [(part, coefficient * factor) for part, factor in reversed(parts)]
    return [term for term in terms if term.degree != ZERO]


def _parts(tensor: tf.Tensor) -> list[tuple[tf.Tensor, float]] | None:
    """Returns tensors and factors that add up to a scalar; `None` if it is not such a sum."""
    operation = tensor.op
    kind, inputs = operation.type, list(operation.inputs)
    if tensor.shape.rank != 0:
        return None
    if kind in ("AddV2", "Add", "AddN"):
        return [(input_tensor, 1.0) for input_tensor in inputs]
    if kind == "Sub":
        return [(inputs[0], 1.0), (inputs[1], -1.0)]
    is_float = bool(inputs) and inputs[0].dtype.is_floating
    if (
        kind in ("Identity", "Neg", "Reshape", "Squeeze", "Sum", "Mean", "Cast")
        and inputs[0].shape.rank == 0
        and is_float
    ):
        return [(inputs[0], -1.0 if kind == "Neg" else 1.0)]
    if kind in ("Mul", "RealDiv", "DivNoNan", "MulNoNan"):
        first, second = (tf.get_static_value(input_tensor) for input_tensor in inputs)
        if second is not None:
            return [(inputs[0], float(second) if kind.startswith("Mul") else 1 / float(second) if second else 0.0)]
        return [(inputs[1], float(first))] if kind.startswith("Mul") and first is not None else None
    if kind in ("Sum", "Mean") and inputs[0].op.type == "Pack" and inputs[0].shape.rank == 1:
        packed = list(inputs[0].op.inputs)
        return [(input_tensor, 1.0 if kind == "Sum" else 1 / len(packed)) for input_tensor in packed]
    return None


def divides_by(loss: tf.Tensor, number: int, *, anywhere: bool = False) -> bool:
    """Whether a loss is a value divided by the constant `number`, with `anywhere` also before means and sums."""
    tensor = loss
    while True:
        operation = tensor.op
        values = [tf.get_static_value(operand) for operand in operation.inputs] if len(operation.inputs) == 2 else []
        if operation.type in ("RealDiv", "DivNoNan") and values[1] is not None:
            if np.all(values[1] == number):
                return True
        elif operation.type == "Mul" and any(value is not None for value in values):
            if any(value is not None and np.size(value) == 1 and np.allclose(value, 1 / number) for value in values):
                return True
        elif operation.type not in _LINEAR:
            return False
        if not anywhere:
            return False
        tensor = operation.inputs[1 if operation.type == "Mul" and values[0] is not None else 0]
