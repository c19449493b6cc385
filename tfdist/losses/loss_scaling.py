"""How the losses of a step on a replica are scaled, term by term, and warnings of those that may not add up."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras_internals.losses import divided, is_one, is_scalar, times
from tfdist.losses.elementwise_degrees import without_guard
from tfdist.losses.sample_degrees import SampleDegrees, degree_of_sum
from tfdist.losses.sample_kinds import ZERO
from tfdist.tensorflow_internals.function_graphs import describe, is_of_keras, is_symbolic

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


_warned: set[str] = set()


class LossStep:
    """How the losses of a step on one of several parts of a batch are scaled.

    A value is a *mean* over the samples of this part (degree 0), or a *part* of a sum over all samples (degree 1).
    While a step is traced, the degrees of losses are found in its graph. In eager execution only losses are known that
    Keras has scaled.

    Attributes:
        has_totals: Whether `total_of` returns the sum over all parts.
        has_scaled: Whether a loss was scaled since this was set to False.
        parts_of_replica: The number of micro-batches of the replica.
        replicas: The number of replicas that share the batch, if they are not all of the strategy.
        unweighted: A value that a metric must count as Keras does.
        logged_loss: The mean over this part that the metric "loss" has counted.
        has_own_loss: Whether the model computes its loss itself.
        has_read_number: Whether the user's code has read the number of replicas in this step.
    """

    has_totals = False
    scaled_degree = 1
    has_scaled = False
    parts_of_replica = 1
    replicas: int | None = None
    has_own_loss = False
    has_read_number = False
    unweighted: Any = None
    logged_loss: Any = None
    fraction: Any = 1
    sum_scale: Any = 1
    _degrees: SampleDegrees | None = None

    @property
    def samples_are_static(self) -> bool:
        """Whether the number of the replica's samples is known when the step is traced."""
        return True

    @property
    def mean_scale(self) -> Any:
        """The factor of a mean over the replica's samples: its `fraction`, whatever mean is being computed."""
        return self.fraction

    @property
    def weight(self) -> Any:
        """The fraction of the samples of the batch in this part."""
        return self.mean_scale

    def share_of(self, divisor: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """A context in which `fraction` is this part's `divisor` divided by the sum over all parts."""
        raise NotImplementedError

    def observe(self, data: Any, samples: int | tf.Tensor) -> None:
        """Prepares to follow the losses of a step that is being traced on `data`, a part of `samples` samples."""
        self._degrees = SampleDegrees(data, samples, int(tf.distribute.get_strategy().num_replicas_in_sync))
        self._known: dict[int, tuple[Any, float]] = {}
        self._degrees.mark(self.fraction, 1, is_loss=False)

    def mark_samples(self, outputs: Any, inputs: Any) -> None:
        """Notes that each sample of a layer's `outputs` counts as computed from the same sample of its `inputs`."""
        if self._degrees is not None:
            self._degrees.mark_samples(outputs, inputs)

    def mark(self, value: Any, degree: float) -> Any:
        """Notes the degree of `value`, and returns it."""
        if self._degrees is not None:
            self._degrees.mark(value, degree)
            self._known[id(value)] = (value, degree)
        return value

    def mark_like(self, value: Any, other: Any) -> Any:
        """Notes that `value`, which is computed eagerly, has the degree of `other`, and returns it."""
        if not is_symbolic(value) and self.degree(other) is not None and value is not other:
            self.mark(value, self.degree(other) or 0)
        return value

    def mark_scaled(self, value: Any) -> Any:
        """Notes that `value` is scaled, and returns it."""
        self.has_scaled = True
        return self.mark(value, self.scaled_degree)

    def degree(self, value: Any) -> float | None:
        """Returns the degree of a value, or of the sum of its elements; `None` if unknown."""
        if not tf.is_tensor(value):
            return 0
        if self._degrees is None:
            return None
        if is_symbolic(value):
            return self._degrees.degree(value)
        known, degree = self._known.get(id(value), (None, None))
        return degree if known is value else None

    def holds_samples(self, tensor: Any) -> bool:
        """Whether an axis of a tensor holds the samples of this part."""
        if self._degrees is not None and is_symbolic(tensor):
            return bool(self._degrees.kind(tensor).axes)
        return bool(tensor.shape.rank) and tensor.shape[0] == self.number_of_samples

    @property
    def number_of_samples(self) -> Any:
        """The number of samples of this part, if it is known."""
        return None

    def total_of(self, value: tf.Tensor) -> Any:
        """Returns the sum of all parts' `value`, a float scalar; `None` if parts cannot exchange it."""
        return None

    def scale_of(self, term: Term) -> Any:
        """Returns the factor that makes a term a part of the loss; `None` if none is known.

        One process has one replica, so a factor of the number of replicas is taken away, except from a sum, which is
        divided by a number of samples of all replicas.
        """
        if term.degree not in (0, 1, ZERO):
            return None
        if term.divisor is not None:
            return self._scale_of_quotient(term)
        scale = self.mean_scale if term.degree == 0 else self.sum_scale
        if not term.replicas or (term.degree == 1 and term.replicas == -1):
            return scale
        return scale * tf.distribute.get_strategy().num_replicas_in_sync ** -term.replicas

    def _scale_or_guess(self, term: Term, *, is_of_samples: bool = False) -> Any:
        """Returns the factor of a term. Warns if it is unknown; then a term with a value a sample counts as a sum."""
        scale = self.scale_of(term)
        if scale is not None:
            return scale
        guess = self.sum_scale if is_of_samples else self._guess(term)
        if not self._is_alone:
            _warn_of_unknown_loss(term.tensor, is_part=is_one(guess))
        return guess

    def _guess(self, term: Term) -> Any:
        """Returns the factor of an unknown term, which counts as a mean unless it contains a scaled loss."""
        return 1 if self._degrees is not None and self._degrees.contains_scaled(term.tensor) else self.mean_scale

    def _scale_of_quotient(self, term: Term) -> Any:
        """Returns the factor of a dividend: that of its degree, divided by the divisor of all samples."""
        scale = self.mean_scale if term.degree == 0 else self.sum_scale
        total = self.total_of(times(term.divisor, scale))
        if total is None:
            return None
        return tf.math.divide_no_nan(tf.cast(scale, total.dtype), total if term.guard is None else term.guard(total))

    def mean_of(self, value: Any) -> Any:
        """Returns a scalar as a mean over the samples of this part, as far as it can be followed."""
        mean = self.mean_if_known(value, guesses=True)
        return value if mean is None else mean

    def mean_if_known(self, value: Any, *, guesses: bool = False) -> Any:
        """Returns a scalar as a mean over the samples of this part; `None` if it cannot be followed.

        If it `guesses`, a term that cannot be followed counts as in `as_part`.
        """
        if not is_symbolic(value) or self._degrees is None:
            degree = self.degree(value)
            part = times(value, self.sum_scale) if degree == 1 else None
            return value if degree == 0 else None if part is None else divided(part, self.mean_scale)
        terms = loss_terms(value, self._degrees)
        if all(term.is_mean for term in terms):
            return value
        scales = [self.scale_of(term) for term in terms]
        if guesses:
            scales = [self._guess(term) if scale is None else scale for term, scale in zip(terms, scales, strict=True)]
        if any(scale is None for scale in scales):
            return None
        return divided(self._part_of(value, terms, scales), self.mean_scale)

    def _part_of(self, loss: Any, terms: list[Term], scales: list[Any]) -> Any:
        if not terms:
            return loss
        if len(terms) == 1 and terms[0].divisor is None:
            return times(loss, scales[0])
        parts = [
            tf.cast(tf.reduce_sum(times(term.tensor, scale)) * term.coefficient, loss.dtype)
            for term, scale in zip(terms, scales, strict=True)
        ]
        return tf.add_n(parts)

    def parts_of_gradient(self, targets: list[Any], gradients: list[Any] | None = None) -> list[tuple[Any, Any]] | None:
        """Returns the tensors to differentiate and the gradients of the loss with respect to each.

        `None` if `targets`, what the user's code differentiates with respect to variables, are right as they are, or
        cannot be followed. The user's code may give `gradients` of the loss with respect to them.
        """
        if self._degrees is None or self._is_alone:
            return None
        if not all(is_symbolic(target) for target in targets):
            if any(self.degree(target) is None for target in targets):
                _warn_of_eager_loss()
            return None
        if gradients is None:
            terms = [term for target in targets for term in self._terms(target)]
            user_gradients: list[Any] = [None] * len(terms)
        else:
            user_gradients = [
                tf.ones_like(target) if gradient is None else gradient
                for target, gradient in zip(targets, gradients, strict=True)
            ]
            products = (self._degrees.product(*pair) for pair in zip(targets, user_gradients, strict=True))
            terms = [
                Term(target, 1.0, *degree_and_power) for target, degree_and_power in zip(targets, products, strict=True)
            ]
        scales = [self._scale_or_guess(term) for term in terms]
        if all(is_one(scale) for scale in scales):
            return None
        return [
            (term.tensor, _gradient(term, scale, user_gradient))
            for term, scale, user_gradient in zip(terms, scales, user_gradients, strict=True)
        ]

    def check_samples(self, values: Any) -> None:
        """Warns if values that a loss of Keras adds up depend on several samples, as those of a contrastive loss."""
        if self.has_own_loss and not self._is_alone and self._degrees is not None and is_symbolic(values):
            if self._degrees.kind(values).degree is None:
                _warn_of_unknown_loss(values, is_part=False)

    @property
    def _is_alone(self) -> bool:
        return is_one(self.mean_scale) and is_one(self.sum_scale)

    def _terms(self, loss: Any) -> list[Term]:
        """The terms of a symbolic loss; warns of literals that may be numbers of samples."""
        assert self._degrees is not None
        terms = loss_terms(loss, self._degrees)
        while self._degrees.ambiguous:
            _warn_of_ambiguous_constant(self._degrees.ambiguous.pop())
        strategy = tf.distribute.get_strategy()
        replicas = int(strategy.num_replicas_in_sync)
        anywhere = getattr(strategy, "has_read_number", False)
        for index, term in enumerate(terms):
            if replicas > 1 and term.is_mean and divides_by(term.tensor, replicas, anywhere=anywhere):
                _warn_of_division_by_replicas(term.tensor, replicas, is_scaled=self.has_read_number)
                terms[index] = dataclasses.replace(term, replicas=-1 if self.has_read_number else 0)
        return terms

    def as_part(self, loss: Any, *, is_mean: bool, is_certain: bool = False) -> Any:
        """Returns a loss of the user's code, a scalar or a tensor whose sum counts, as a part.

        A loss that cannot be followed is a mean if `is_mean`, otherwise a part already; unless that `is_certain`, it is
        warned of.
        """
        if self._degrees is None or not is_symbolic(loss):
            if self.degree(loss) == self.scaled_degree and is_scalar(loss):
                return self.mark_scaled(loss)
            is_doubtful = self._degrees is not None and is_scalar(loss) and tf.is_tensor(loss)
            if is_doubtful and not (is_certain or self._is_alone):
                _warn_of_eager_loss()
            scale = self.mean_scale if is_mean else 1
            if not is_scalar(loss):
                scale = self.sum_scale if self.holds_samples(loss) else self.mean_scale
            return self.mark_scaled(times(loss, scale))
        terms = self._terms(loss)
        first, samples = loss.shape[0] if loss.shape.rank else 1, self.number_of_samples
        is_of_samples = first is None or (isinstance(samples, int) and bool(loss.shape.rank) and first == samples)
        scales = [self._scale_or_guess(term, is_of_samples=is_of_samples) for term in terms]
        return self.mark_scaled(self._part_of(loss, terms, scales))


def _gradient(term: Term, scale: Any, user_gradient: Any) -> tf.Tensor:
    """Returns the gradient of the loss with respect to a term's tensor, from the one that the user's code passes."""
    scale = tf.cast(scale, term.tensor.dtype) * term.coefficient
    return tf.broadcast_to(scale, tf.shape(term.tensor)) if user_gradient is None else times(user_gradient, scale)


def _warn_of_unknown_loss(tensor: tf.Tensor, *, is_part: bool) -> None:
    """Warns that a loss is not linear in the samples, or cannot be followed."""
    meant = "a part of the loss, because it contains one" if is_part else "a mean over the replica's samples"
    _warn(
        "A loss is neither a mean nor a sum over the replica's samples as far as tfdist can see, so the replicas' "
        f"losses may not add up to that of one process. It counts as {meant}. Received: {describe(tensor)}. "
        "Expected: means (`tf.reduce_mean`), sums, losses of Keras, and sums of these. Pass the mean over the "
        "replica's samples to "
        "`tfdist.training.scale_loss_for_distribution` in that line, and combine the result by sums and constant "
        "factors only."
    )


def _warn_of_eager_loss() -> None:
    """Warns that a loss is computed eagerly by other means than those of Keras."""
    _warn(
        "A step computes a loss eagerly and not by the losses of Keras alone, so tfdist cannot see whether it is a "
        "mean over the replica's samples, and its gradients may not add up to those of one process. "
        "Received: run_eagerly=True. Expected: a traced step, or a scaled loss. Compile with `run_eagerly=False`, "
        "or pass each mean to `tfdist.training.scale_loss_for_distribution`, and the losses to `tape.gradient` in "
        "a list."
    )


def _warn_of_ambiguous_constant(tensor: tf.Tensor) -> None:
    """Warns that a sum over the samples is divided by a number that may be, or contain, the number of samples.

    Keras itself divides by the number of samples, as for `activity_regularizer`.
    """
    if is_of_keras(tensor):
        return
    _warn(
        "A sum over the samples is divided by a number that equals the number of a replica's samples, or a "
        "multiple of it, so tfdist cannot see whether a mean or a sum is meant: an equal number counts as the "
        f"mean, a multiple as the sum. Received: {describe(tensor)}. Expected: `tf.reduce_mean`, or a division "
        "by `tf.shape(x)[0]`, for a mean."
    )


def _warn_of_division_by_replicas(tensor: tf.Tensor, replicas: int, *, is_scaled: bool) -> None:
    """Warns that a mean is divided by the number of replicas, which was not read from the strategy."""
    meant = "a mean that is scaled for them" if is_scaled else "a mean of this size in one process, too"
    _warn(
        f"A loss of the program multiplies a mean by 1/{replicas}, and there are {replicas} replicas: tfdist "
        f"scales means itself, and takes this for {meant}. Received: {describe(tensor)}. Expected: the loss of one "
        "process. If the factor stands for the number of replicas, remove it, or write "
        "`loss / strategy.num_replicas_in_sync`."
    )


def _warn(message: str) -> None:
    """Gives each warning once in a process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=5)
