"""The states of metrics over all workers after each step, so that a lost worker's samples stay in them."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable


class MetricTotals:
    """A copy of the sum of each metric's state over all replicas, on each worker.

    Attributes:
        largest_bytes: The size up to which the states of all metrics are exchanged in each step. Larger ones (a
            confusion matrix of 1,000 classes) are sent at the end of the epoch, when Keras reads them; until then batch
            logs are the replicas' mean.
    """

    largest_bytes = 256 * 2**10

    def __init__(self) -> None:
        self._totals: dict[int, tuple[Any, Any]] = {}  # a Keras variable, and its sum, by the identity of the first

    @property
    def variables(self) -> list[Any]:
        """The sums."""
        return [total for _, total in self._totals.values()]

    def of(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the sums of Keras variables of metrics; `None` for those that were not stored."""
        return [self._totals.get(id(variable), (None, None))[1] for variable in variables]

    def store(self, variables: Sequence[Any], totals: Sequence[tf.Tensor]) -> None:
        """Stores the sums after a step, on one replica of this worker."""
        for variable, total in zip(variables, totals, strict=True):
            if id(variable) not in self._totals:
                with tf.init_scope():
                    made = ResourceVariable(tf.zeros(total.shape, total.dtype), trainable=False)
                self._totals[id(variable)] = variable, made
            self._totals[id(variable)][1].assign(total)

    def clear(self, variables: Sequence[Any]) -> None:
        """Forgets the sums of Keras variables of metrics that are reset."""
        for variable in variables:
            _, total = self._totals.get(id(variable), (None, None))
            if total is not None:
                total.assign(tf.zeros_like(total))

    def divide(self, *, is_first: bool) -> None:
        """Gives the sums to the first of the workers that are left, and nothing to the others."""
        for variable, total in self._totals.values():
            for number, local in enumerate(_local(variable)):
                local.assign(total if is_first and number == 0 else tf.zeros_like(total))


def _local(variable: Any) -> Sequence[Any]:
    value = variable.value
    return tuple(getattr(value, "values", (value,)))
