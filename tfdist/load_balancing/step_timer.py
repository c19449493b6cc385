"""Times, in the graph, how long a replica computes in a training step, without its exchanges with others.

That is the time from when its data is there and its last update is made, until its gradients are computed, and from
when the sums of the gradients are there, until its weights are updated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.operation_order import after_clocks, read_clock
from tfdist.tensorflow_internals.shared_operations import step_after
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable


class StepTimer:
    """Times the steps of one replica, which it keeps in the host memory of the worker."""

    def __init__(self, host: str) -> None:
        """Creates the variables on `host`, the CPU device of a worker."""
        self._host = host
        with tf.init_scope(), tf.device(host):
            self._last = ResourceVariable(tf.zeros([2]), trainable=False, name="step_timer")
            self._started_at = ResourceVariable(tf.zeros([], tf.int64), trainable=False, name="step_started_at")

    def start(self, data: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], rows: Any) -> "TimedStep":
        """Starts the clock of a step when its data is there and the last update of its weights is made.

        Some weights suffice, as the step reads them. `rows` is the number of rows of the replica's part.
        """
        return TimedStep(self._host, self._last, self._started_at, [*data, *weights], rows)


class TimedStep:
    """A training step of a replica whose computation is timed, with its first update.

    What is timed waits for the clock: otherwise TensorFlow may compute first and read the clock last.

    Attributes:
        last: The last step that was timed before: its seconds, its rows, and the seconds from its start to the start of
            this one; float32 of shape [3], zeros if there is none. It is known when a step starts, so that the exchange
            of times waits for nothing.
    """

    def __init__(
        self, host: str, variable: tf.Variable, started_at: tf.Variable, ready: Sequence[tf.Tensor], rows: Any
    ) -> None:
        self._host, self._variable, self._rows = host, variable, rows
        self._graph = _graph()
        self._gradients_at: tf.Tensor | None = None
        self._sums_at: tf.Tensor | None = None
        self._waits: list[tf.Tensor] = []  # when each reduction began and ended, in turn
        with tf.device(host):
            last, before = tf.convert_to_tensor(variable), tf.convert_to_tensor(started_at)
        # The clock waits for the time of the last step, so that nothing of that step counts in this one.
        self._start = self._now([*ready, last])
        with tf.device(host):
            passed = tf.maximum(self._start - before, 0)  # The clock may have been set back.
            interval = tf.where(before > 0, tf.cast(passed, tf.float64) / 1e9, 0.0)
            self.last = tf.concat([last, [tf.cast(interval, tf.float32)]], axis=0)
            started_at.assign(self._start)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Makes all that is computed in this context, in which the step is traced, wait for the clock of the start."""
        with step_after([self._start]):
            yield

    def waiting(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]]]:
        """Leaves out the time of a reduction of `tensors`.

        Returns:
            The tensors to reduce, and a function that takes the reduced tensors and returns those to use.
        """
        if self._gradients_at is not None or self._graph is None or _graph() is not self._graph:
            return tensors, lambda reduced: reduced
        began = self._now([*tensors, self._start])

        def ended(reduced: Sequence[Any]) -> Sequence[Any]:
            end = self._now([*reduced, began])
            self._waits += [began, end]
            return after_clocks([end], reduced)

        return after_clocks([began], tensors), ended

    def gradients_ready(self, gradients: Sequence[Any]) -> None:
        """Stops the clock when all `gradients` are computed. Only the first call in a step has an effect.

        The exchange of the first gradients does not wait for the last ones, but the update does: if the clock is read
        late, the computation that is left of the step has been added, not an update.
        """
        if self._gradients_at is None and _graph() is self._graph:
            self._gradients_at = self._now([*(gradient for gradient in gradients if gradient is not None), self._start])

    @contextmanager
    def updating(self, sums: Any) -> Iterator[None]:
        """Times the update, which is made in this context, from when the sums of the gradients are there.

        Only the first call in a step has an effect.
        """
        if self._gradients_at is None or self._sums_at is not None or _graph() is not self._graph:
            yield
            return
        self._sums_at = self._now([*tf.nest.flatten(sums), self._gradients_at])
        with step_after([self._sums_at]):
            yield

    def end(self, weights: Sequence[tf.Tensor]) -> None:
        """Stores the time of the step when `weights`, as they are read after it, are updated."""
        if self._gradients_at is None:  # no update, or one in a branch
            return
        ended = None if self._sums_at is None else self._now([*weights, self._sums_at])
        with tf.device(self._host):
            spent = self._gradients_at - self._start
            if self._waits:
                times = [self._start, self._gradients_at, *self._waits]
                waited = tf.numpy_function(_waited, times, tf.int64, stateful=False)
                spent -= tf.ensure_shape(waited, [])
            if ended is not None:
                spent += tf.maximum(ended - self._sums_at, 0)
            seconds = tf.cast(tf.cast(tf.maximum(spent, 1), tf.float64) / 1e9, tf.float32)
            self._variable.assign(tf.stack([seconds, tf.cast(self._rows, tf.float32)]))

    def _now(self, ready: Sequence[Any]) -> tf.Tensor:
        return read_clock(ready, self._host)


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _waited(start: int, end: int, *times: int) -> np.int64:
    """Returns how long waits lasted that may overlap, from `start` to `end`, in nanoseconds.

    `times` are when each wait began and ended.

    >>> int(_waited(0, 10, *(2, 4), *(3, 5), *(9, 12)))
    4
    """
    waited, until = 0, int(start)
    for begin, finish in sorted(zip(times[::2], times[1::2], strict=True)):
        begin, finish = max(int(begin), until), min(int(finish), int(end))
        if finish > begin:
            waited, until = waited + finish - begin, finish
    return np.int64(waited)
