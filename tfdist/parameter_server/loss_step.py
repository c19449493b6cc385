"""How the losses of a step weigh in the batch that all parts of a push or a round make together.

The parts' gradients are added up by their samples: part p, of n_p samples, counts n_p / N. That is right for a mean
over the samples. A sum must be multiplied by N / n_p before, and so must a mean with a divisor of its own (the valid
entries of a mask, the sum of weights), of which the part has d_p of D: by d_p / D * N / n_p.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


class _Step:
    """A step whose losses are those of a batch by itself."""

    # What Keras divides by the number of replicas stays as it is.
    has_scaled = False
    parts_of_replica = 1
    samples_are_static = True

    def __init__(self) -> None:
        self.fraction: Any = 1
        self.sum_scale: Any = 1
        self._graph = tf.compat.v1.get_default_graph()

    @contextmanager
    def share_of(self, divisor: tf.Tensor) -> Iterator[None]:
        """A mean is taken in this that divides by `divisor`, a float32 scalar.

        In a condition, a loop, or a function of its own nobody could know its divisor beforehand: there it counts as a
        mean over the samples.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            yield
            return
        self.fraction = self._fraction_of(tf.stop_gradient(divisor))
        try:
            yield
        finally:
            self.fraction = 1

    def _fraction_of(self, divisor: tf.Tensor) -> Any:
        raise NotImplementedError


class MicroStep(_Step):
    """A micro-step of a part.

    Attributes:
      own_divisors: how many means with a divisor of their own were taken so far.
    """

    def __init__(self, sum_scale: Any = 1, divisors: Sequence[tf.Tensor] = ()) -> None:
        """Describes it.

        Args:
          sum_scale: the samples of all parts divided by those of this micro-step, a float64 scalar; or 1.
          divisors: of all parts, in the order in which the means are taken; where one is not known, the mean counts
            as one over the samples.
        """
        super().__init__()
        self.sum_scale = sum_scale
        self.own_divisors = 0
        self._divisors = divisors

    def _fraction_of(self, divisor: tf.Tensor) -> Any:
        self.own_divisors += 1
        if self.own_divisors > len(self._divisors):
            return 1
        whole = self._divisors[self.own_divisors - 1]
        return tf.math.divide_no_nan(tf.cast(divisor, whole.dtype), whole) * self.sum_scale


class AllRecorded(BaseException):
    """Ends a step that was run for its divisors only; no `except Exception` of a model's holds it up."""


class Recording(_Step):
    """A step that is run for its divisors only.

    Attributes:
      divisors: of the means so far.
    """

    def __init__(self, number: int) -> None:
        """Records `number` divisors, and raises `AllRecorded` at the last one."""
        super().__init__()
        self.divisors: list[tf.Tensor] = []
        self._number = number

    def _fraction_of(self, divisor: tf.Tensor) -> Any:
        self.divisors.append(divisor)
        if len(self.divisors) == self._number:
            raise AllRecorded
        return 1
