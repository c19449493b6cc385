"""Sums the metrics of all workers on the chief."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.step_logs import metric_results
from tfdist.parameter_server.step_results import LogPart, combined, with_results


class MetricSums:
    """The metrics' sums over all steps since the last reset; each step counts once.

    Correct for metrics whose variables are sums over samples, as those of all Keras metrics are.

    Attributes:
        has_results: Whether a step was added since the last reset. (A step may return no logs.)
    """

    def __init__(self, model: keras.Model) -> None:
        """Starts with the present values of the model's metrics."""
        self._model = model
        self._sums: list[np.ndarray] | None = None
        self._is_new = False
        self._known: dict[str, Any] = {}
        self._logs: LogPart = {"values": {}, "is_result": np.zeros([0, 0], bool)}
        self._numbers, self._next, self._early = 0, 0, dict[int, tuple[Any, Any]]()
        self.has_results = False
        # Eagerly, computing a result takes longer than the chief may spend on a batch.
        self._result_of = tf.function(self._results_of, autograph=False)

    def reset(self) -> None:
        self._sums, self._known, self._is_new = None, {}, False
        self._numbers, self._next, self._early = 0, 0, {}
        self.has_results = False

    def add(self, metrics: Sequence[tf.Tensor], logs: LogPart) -> None:
        """Adds a step; see `add_parts`."""
        self.add_parts([metrics], [logs], [1.0])

    def add_parts(
        self, metrics: Sequence[Sequence[tf.Tensor]], logs: Sequence[LogPart], weights: Sequence[float]
    ) -> None:
        """Adds a step that was computed in parts.

        Args:
            metrics: By part, what the step has added to the variables of the metrics.
            logs: By part, what the step returned.
            weights: The fraction of the samples in each part.
        """
        if self._sums is None:
            self._sums = [variable.numpy() for variable in self._model.metrics_variables]
        for of_part in metrics:
            self._sums = [total + np.asarray(part) for total, part in zip(self._sums, of_part, strict=True)]
        self._logs = combined(logs, weights)
        self._is_new = self.has_results = True

    def next_number(self) -> int:
        """Returns the number by which a step is later given to `add_in_order`."""
        self._numbers += 1
        return self._numbers - 1

    def add_in_order(self, number: int, metrics: Sequence[tf.Tensor], logs: LogPart) -> None:
        """As `add`, but in the order of the numbers, so that rounding does not depend on which step ended first."""
        self._early[number] = metrics, logs
        while self._next in self._early:
            self.add(*self._early.pop(self._next))
            self._next += 1

    def results(self) -> dict[str, Any]:
        """Returns the last step's logs, in which the metrics have their results over all steps."""
        if self._is_new and self._sums is not None:
            self._known = with_results(self._logs, self._result_of([tf.constant(total) for total in self._sums]))
            self._is_new = False
        return dict(self._known)

    def _results_of(self, sums: list[tf.Tensor]) -> list[Any]:
        with keras.StatelessScope(list(zip(self._model.metrics_variables, sums, strict=True))):
            return [result for _, result in metric_results(self._model)]

    def store(self) -> None:
        """Writes the sums to the variables of the metrics."""
        if self._sums is not None:
            for variable, total in zip(self._model.metrics_variables, self._sums, strict=True):
                variable.assign(total)
            self._sums = None
