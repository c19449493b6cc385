"""Times, in the graph, the encoding, the exchange and the decoding of gradients."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compression import Group
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

_ENCODE, _EXCHANGE, _DECODE = range(3)


@dataclass(frozen=True)
class ExchangeDurations:
    """Time spent on buckets of gradients, added up. Buckets overlap each other and the computation.

    Attributes:
        encode_seconds: From when a bucket's gradients are ready to its first collective, and between its collectives.
        exchange_seconds: In collectives, including the time to wait for other replicas.
        decode_seconds: From the result of the last collective to the sums.
    """

    encode_seconds: float = 0.0
    exchange_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __add__(self, other: "ExchangeDurations") -> "ExchangeDurations":
        return ExchangeDurations(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, earlier: "ExchangeDurations") -> "ExchangeDurations":
        return ExchangeDurations(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class ExchangeTimer:
    """Times the buckets of one replica. Each bucket has a counter in the host memory of the worker.

    Stateless Python functions read the clock; they depend on the data alone. TensorFlow would run stateful ones in
    program order, so that later operations, including other replicas' collectives, would wait for them.
    """

    def __init__(self, host: str) -> None:
        """Creates counters on `host`, the CPU device of a worker."""
        self._host = host
        self._counters: list[tuple[str, tf.Variable]] = []
        self._eager: dict[str, tf.Variable] = {}

    def timed(self, group: Group, label: str) -> "TimedGroup":
        """Returns `group` such that its reductions from now on are timed under `label`."""
        return TimedGroup(group, self, label)

    def by_label(self) -> dict[str, ExchangeDurations]:
        """Returns the durations so far, by label. Call this eagerly."""
        totals: dict[str, ExchangeDurations] = {}
        for label, counter in self._counters:
            spent = ExchangeDurations(*(nanoseconds / 1e9 for nanoseconds in counter.numpy().tolist()[:3]))
            totals[label] = totals.get(label, ExchangeDurations()) + spent
        return totals

    def new_counter(self, label: str) -> tf.Variable:
        """Returns a bucket's variable: nanoseconds of encoding, exchange and decoding, and the last time of reading."""
        if tf.executing_eagerly() and label in self._eager:
            return self._eager[label]  # Eager buckets run one after another, so they share a counter.
        with tf.init_scope(), tf.device(self._host):
            counter = ResourceVariable(tf.zeros([4], tf.int64), trainable=False, name="exchange_timer")
        self._counters.append((label, counter))
        if tf.executing_eagerly():
            self._eager[label] = counter
        return counter

    def start(self, counter: tf.Variable, data: Sequence[tf.Tensor]) -> tf.Tensor:
        """Starts the clock of a bucket when all of `data` is computed, and returns that time."""
        with tf.device(self._host):
            *spent, ended = tf.unstack(tf.convert_to_tensor(counter))
            now = self._now(data, ended)
            counter.assign(tf.stack([*spent, now]))
        return now

    def add_elapsed(self, counter: tf.Variable, kind: int, data: Sequence[tf.Tensor], start: tf.Tensor) -> None:
        """Adds the time from the last reading until all of `data` is computed; nothing if that was earlier."""
        now = self._now(data, start)
        with tf.device(self._host):
            *spent, ended = tf.unstack(tf.convert_to_tensor(counter))
            spent[kind] += tf.maximum(now - ended, 0)
            counter.assign(tf.stack([*spent, tf.maximum(now, ended)]))

    def _now(self, data: Sequence[tf.Tensor], never_constant: tf.Tensor) -> tf.Tensor:
        # If all inputs were constants, TensorFlow would compute the time once for all steps.
        samples = [tf.reshape(tensor, [-1])[:1] for tensor in data]
        with tf.device(self._host):
            read = tf.numpy_function(_nanoseconds, [never_constant, *samples], tf.int64, stateful=False)
        return tf.ensure_shape(read, [])


class TimedGroup(Group):
    """A group that times its reductions, from `begin_bucket` to `end_bucket`."""

    def __init__(self, group: Group, timer: ExchangeTimer, label: str) -> None:
        self._group, self._timer, self._label = group, timer, label

    @property
    def size(self) -> int:
        return self._group.size

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        self._add_elapsed(_ENCODE, tensor)
        result = self._group.sum(tensor)
        self._add_elapsed(_EXCHANGE, result)
        return result

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        self._add_elapsed(_ENCODE, tensor)
        result = self._group.gather(tensor)
        self._add_elapsed(_EXCHANGE, result)
        return result

    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        self._add_elapsed(_ENCODE, slices)
        received, position = self._group.exchange(slices)
        self._add_elapsed(_EXCHANGE, received)
        return received, position

    def exchange_rows(self, rows: tf.Tensor) -> tf.Tensor:
        self._add_elapsed(_ENCODE, rows)
        received = self._group.exchange_rows(rows)
        self._add_elapsed(_EXCHANGE, received)
        return received

    def bucket(self, gradients: Sequence[tf.Tensor]) -> "_TimedBucket":
        """Returns the group for one bucket of `gradients`."""
        return _TimedBucket(self._group, self._timer, self._label, gradients)

    def _add_elapsed(self, kind: int, *data: tf.Tensor) -> None:
        """Adds the time until `data` is computed to that of `kind`. Outside of a bucket nothing is timed."""


class _TimedBucket(TimedGroup):
    def __init__(self, group: Group, timer: ExchangeTimer, label: str, gradients: Sequence[tf.Tensor]) -> None:
        super().__init__(group, timer, label)
        self._counter = timer.new_counter(label)
        self._start = timer.start(self._counter, gradients)

    def end(self, sums: Sequence[tf.Tensor]) -> None:
        self._add_elapsed(_DECODE, *sums)

    def _add_elapsed(self, kind: int, *data: tf.Tensor) -> None:
        self._timer.add_elapsed(self._counter, kind, data, self._start)


def begin_bucket(group: Group, gradients: Sequence[tf.Tensor]) -> Group:
    """Returns the group over which to reduce a bucket of `gradients`: `group` itself unless it is a `TimedGroup`."""
    return group.bucket(gradients) if isinstance(group, TimedGroup) else group


def end_bucket(group: Group, sums: Sequence[tf.Tensor]) -> None:
    """Ends the timing that `begin_bucket` began; `group` is what that returned, `sums` the bucket's results."""
    if isinstance(group, _TimedBucket):
        group.end(sums)


def _nanoseconds(*_: Any) -> np.int64:
    return np.int64(time.perf_counter_ns())
