"""The step that runs on a replica, as Keras' losses and metrics and TensorFlow's gradient tapes use it."""

import contextlib
import warnings
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.loss_terms import Term, describe, divides_by, loss_terms
from tfdist.tensorflow_internals.sample_degrees import ZERO, SampleDegrees, is_symbolic

_warned: set[str] = set()


class LossStep:
    """How the losses of a step on one of several parts of a batch are scaled.

    A value is a *mean* over the samples of this part (degree 0), or a *part* of a sum over all samples (degree 1).
    While a step is traced, the degrees of losses are found in its graph. In eager execution only losses are known that
    Keras has scaled.

    Attributes:
        has_scaled: Whether a loss was scaled since this was set to False.
        parts_of_replica: The number of micro-batches of the replica.
        unweighted: A value that a metric must count as Keras does.
        scales_itself: Whether the user's code has read the number of replicas, so that it scales losses itself.
    """

    scaled_degree = 1
    has_scaled = False
    parts_of_replica = 1
    unweighted: Any = None
    scales_itself = False
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
        self._degrees = SampleDegrees(data, samples)
        self._known: dict[int, tuple[Any, int]] = {}
        self._degrees.mark(self.fraction, 1)

    def mark(self, value: Any, degree: int) -> Any:
        """Notes the degree of `value`, and returns it."""
        if self._degrees is not None:
            self._degrees.mark(value, degree)
            self._known[id(value)] = (value, degree)
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

    def scale_of(self, degree: float | None) -> Any:
        """The factor that makes a value of degree 0 or 1 a part; `None` for other degrees."""
        return self.mean_scale if degree == 0 else self.sum_scale if degree in (1, ZERO) else None

    def mean_of(self, value: Any) -> Any:
        """Returns a scalar as a mean over the samples of this part. What cannot be followed counts as a mean."""
        mean = self.mean_if_known(value)
        return value if mean is None else mean

    def mean_if_known(self, value: Any) -> Any:
        """Returns a scalar as a mean over the samples of this part; `None` if it cannot be followed."""
        if self.scales_itself or self.degree(value) == 0:
            return value
        if is_symbolic(value) and self._degrees is not None:
            part = self._part_of(value, loss_terms(value, self._degrees))
        else:
            part = times(value, self.sum_scale) if self.degree(value) == 1 else None
        return None if part is None else divided(part, self.mean_scale)

    def _part_of(self, loss: Any, terms: list[Term]) -> Any:
        """Returns a loss with the given terms as a part, or `None` if the degree of a term is unknown."""
        scales = [self.scale_of(term.degree) for term in terms]
        if None in scales:
            return None
        if len(terms) <= 1:
            return times(loss, scales[0]) if terms else loss
        parts = [
            tf.cast(tf.reduce_sum(times(term.tensor, scale)) * term.coefficient, loss.dtype)
            for term, scale in zip(terms, scales, strict=True)
        ]
        return tf.add_n(parts)

    def parts_of_gradient(self, targets: list[Any]) -> list[tuple[Any, Any]] | None:
        """Returns the tensors to differentiate and the gradients of the loss with respect to each.

        Args:
            targets: What the user's code differentiates with respect to variables.

        Returns:
            `None` if the targets are right as they are, or cannot be followed.
        """
        if self.scales_itself or self._degrees is None or _is_one(self.mean_scale) and _is_one(self.sum_scale):
            return None
        if not all(is_symbolic(target) for target in targets):
            if not self.has_scaled:
                self._warn_once(
                    "A `train_step` computes a loss eagerly and without the losses of Keras, so tfdist cannot see "
                    "whether it is a mean over the replica's samples, and its gradients are summed over the replicas "
                    "unscaled. Received: run_eagerly=True. Expected: a traced step, or a scaled loss. Compile with "
                    "`run_eagerly=False`, or pass the mean to `tfdist.training.scale_loss_for_distribution`."
                )
            return None
        parts, changes = [], False
        for target in targets:
            for term in loss_terms(target, self._degrees):
                scale = self.scale_of(term.degree)
                if scale is None:
                    self._warn_unknown(term.tensor)
                    scale = 1
                changes |= not _is_one(scale)
                if term.degree == 0:
                    self._check_not_divided(term.tensor)
                parts.append((term.tensor, tf.cast(scale, term.tensor.dtype) * term.coefficient))
        return [(tensor, tf.broadcast_to(scale, tf.shape(tensor))) for tensor, scale in parts] if changes else None

    def as_part(self, loss: Any, *, is_mean: bool) -> Any:
        """Returns a loss of the user's code as a part.

        Args:
            loss: A scalar or a tensor, whose sum counts.
            is_mean: Whether a loss that cannot be followed is a mean. Otherwise it is a part already.
        """
        if self._degrees is None or not is_symbolic(loss):
            scale = self.mean_scale if is_mean else 1
            if not is_scalar(loss):
                scale = self.sum_scale if self.holds_samples(loss) else self.mean_scale
            return self.mark_scaled(times(loss, scale))
        terms = loss_terms(loss, self._degrees)
        part = self._part_of(loss, terms)
        if part is None:
            self._warn_unknown(next(term.tensor for term in terms if self.scale_of(term.degree) is None))
            part = times(loss, self.mean_scale if is_mean else 1)
        return self.mark_scaled(part)

    def _check_not_divided(self, tensor: tf.Tensor) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1 and divides_by(tensor, replicas):
            self._warn_once(
                f"A custom `train_step` multiplies a mean by 1/{replicas}, and there are {replicas} replicas: tfdist "
                f"scales means itself. Received: {describe(tensor)}. Expected: the loss of one process. If the factor "
                "stands for the number of replicas, remove it, or read `strategy.num_replicas_in_sync` in `train_step`."
            )

    def _warn_unknown(self, tensor: tf.Tensor) -> None:
        self._warn_once(
            "A loss is neither a mean nor a sum over the replica's samples as far as tfdist can see, so the replicas' "
            f"losses may not add up to that of one process. Received: {describe(tensor)}. Expected: means "
            "(`tf.reduce_mean`), sums, losses of Keras, and sums of these. Pass the mean over the replica's samples to "
            "`tfdist.training.scale_loss_for_distribution` in that line, and combine the result by sums and constant "
            "factors only."
        )

    def _warn_once(self, message: str) -> None:
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, stacklevel=4)


def is_scalar(value: Any) -> bool:
    """Whether a tensor or number has the rank 0, or a rank that is not known."""
    shape = getattr(value, "shape", ())
    return shape.rank in (0, None) if isinstance(shape, tf.TensorShape) else not len(shape)


def times(value: Any, fraction: Any) -> Any:
    """Returns `value * fraction`; 0 where `fraction` is 0, whatever `value` is.

    A replica without samples has the fraction 0; its loss, which may be NaN (a mean over nothing), counts as 0.
    """
    if _is_one(fraction):
        return value
    value = tf.convert_to_tensor(value)
    return tf.math.multiply_no_nan(value, tf.cast(fraction, value.dtype))


def divided(value: Any, fraction: Any) -> Any:
    """Returns `value / fraction`; 0 where `fraction` is 0."""
    return value if _is_one(fraction) else tf.math.divide_no_nan(value, tf.cast(fraction, value.dtype))


def _is_one(fraction: Any) -> bool:
    return not tf.is_tensor(fraction) and fraction == 1
