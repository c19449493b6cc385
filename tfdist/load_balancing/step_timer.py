"""Times, in the graph, how long a replica computes in a training step, without its exchanges with others.

That is the time from when its data is there and its last update is made, until its gradients are computed, and from
when the sums of the gradients are there, until its weights are updated.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable


class StepTimer:
    """Times the steps of one replica, which it keeps in the host memory of the worker.

    Stateless Python functions read the clock, as in `collectives.exchange_timer`: TensorFlow would run stateful ones in
    program order, and later operations would wait for them.
    """

    def __init__(self, host: str) -> None:
        """Creates the variable on `host`, the CPU device of a worker."""
        self._host = host
        with tf.init_scope(), tf.device(host):
            self._last = ResourceVariable(tf.zeros([2]), trainable=False, name="step_timer")

    def start(self, data: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], rows: Any) -> "TimedStep":
        """Starts the clock of a step when its data is there and the last update of its weights is made.

        Args:
            data: The tensors of the replica's part of the batch.
            weights: Some weights of the model, as the step reads them.
            rows: The number of rows of the part.
        """
        with tf.device(self._host):
            last = tf.convert_to_tensor(self._last)
        return TimedStep(self._host, self._last, last, [*data, *weights], rows)


class TimedStep:
    """A training step of a replica whose computation is timed, with its first update.

    Attributes:
        last: The last step that was timed before: its seconds and its rows, float32 of shape [2]; zeros if there is
            none. It is known when a step starts, so that the exchange of times waits for nothing.
    """

    def __init__(
        self, host: str, variable: tf.Variable, last: tf.Tensor, ready: Sequence[tf.Tensor], rows: Any
    ) -> None:
        self._host, self._variable, self.last, self._rows = host, variable, last, rows
        self._graph = _graph()
        self._gradients_at: tf.Tensor | None = None
        self._sums_at: tf.Tensor | None = None
        self._readings = 0
        self._waits: list[tf.Tensor] = []  # when a reduction began and ended, in turn
        self._start = self._now(ready, tf.cast(last[0], tf.int64))

    def waiting(self, tensors: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        """Leaves out the time of a reduction of `tensors`; call the result with what has been reduced."""
        if self._gradients_at is not None or self._graph is None or _graph() is not self._graph:
            return _ignore
        began = self._now(tensors, self._start)

        def ended(reduced: Sequence[Any]) -> None:
            self._waits += [began, self._now(reduced, began)]

        return ended

    def gradients_ready(self, gradients: Sequence[Any]) -> None:
        """Stops the clock when all `gradients` are computed. Only the first call in a step has an effect."""
        if self._gradients_at is None and _graph() is self._graph:
            self._gradients_at = self._now([one for one in gradients if one is not None], self._start)

    def sums_ready(self, sums: Any) -> None:
        """Resumes when the sums of the gradients over all replicas are there. Only the first call has an effect."""
        if self._gradients_at is not None and self._sums_at is None and _graph() is self._graph:
            self._sums_at = self._now(tf.nest.flatten(sums), self._gradients_at)

    def end(self, weights: Sequence[tf.Tensor]) -> None:
        """Stores the time of the step when `weights`, as they are read after it, are updated."""
        if self._gradients_at is None:  # no update, or one in a branch
            return
        times = [self._start, self._gradients_at, *self._waits]
        if self._sums_at is not None:
            times += [self._sums_at, self._now(weights, self._sums_at)]
        function = functools.partial(_seconds, has_update=self._sums_at is not None)
        with tf.device(self._host):
            seconds = tf.ensure_shape(tf.numpy_function(function, times, tf.float32, stateful=False), [])
            self._variable.assign(tf.stack([seconds, tf.cast(self._rows, tf.float32)]))

    def _now(self, ready: Sequence[Any], never_constant: tf.Tensor) -> tf.Tensor:
        # A number for each reading: TensorFlow merges equal operations.
        self._readings += 1
        tensors = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in ready]
        with tf.control_dependencies(tensors), tf.device(self._host):
            inputs = [never_constant, tf.constant(self._readings)]
            return tf.ensure_shape(tf.numpy_function(_nanoseconds, inputs, tf.int64, stateful=False), [])


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _ignore(reduced: Sequence[Any]) -> None:
    del reduced


def _nanoseconds(*_: Any) -> np.int64:
    return np.int64(time.perf_counter_ns())


def _seconds(start: int, end: int, *times: int, has_update: bool = False) -> np.float32:
    """Returns the seconds from `start` to `end` without the waits, and of an update; all times in nanoseconds.

    >>> second = 1_000_000_000
    >>> waits_that_overlap = 2 * second, 4 * second, 3 * second, 5 * second
    >>> float(_seconds(0, 10 * second, *waits_that_overlap))
    7.0
    >>> float(_seconds(0, 10 * second, *waits_that_overlap, 20 * second, 21 * second, has_update=True))
    8.0

    Args:
        start: When the data is there.
        end: When the gradients are computed.
        *times: When each wait began and ended; then, with `has_update`, when the update did.
        has_update: Whether an update was timed.
    """
    numbers = [int(one) for one in times]
    *waits, update_start, update_end = numbers if has_update else (*numbers, 0, 0)
    waited, until = 0, int(start)
    for begin, finish in sorted(zip(waits[::2], waits[1::2], strict=True)):
        begin, finish = max(begin, until), min(finish, int(end))
        if finish > begin:
            waited, until = waited + finish - begin, finish
    return np.float32(max(int(end) - int(start) - waited + max(update_end - update_start, 0), 1) / 1e9)
