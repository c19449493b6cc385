"""Times the encoding, the exchange and the decoding of gradients where they happen: in the graph."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compression import Group
from tfdist.tensorflow_internals.symbols import ResourceVariable

_ENCODE, _EXCHANGE, _DECODE = range(3)


@dataclass(frozen=True)
class Durations:
    """What buckets of gradients have taken, added up; buckets overlap each other and the computation.

    Attributes:
      encode_seconds: from a bucket's gradients being there to its first collective, and between its collectives.
      exchange_seconds: within collectives, with the waiting for other replicas.
      decode_seconds: from the result of the last collective to the sums.
    """

    encode_seconds: float = 0.0
    exchange_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __add__(self, other: "Durations") -> "Durations":
        return Durations(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, earlier: "Durations") -> "Durations":
        return Durations(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class Stopwatch:
    """Takes the times of one replica's buckets; every bucket has a counter in the host memory of the worker.

    The clock is read by stateless Python functions that depend on nothing but the data. TensorFlow would put stateful
    ones into the order of the program, so that what comes later, other replicas' collectives too, waited for them.
    """

    def __init__(self, host: str) -> None:
        """Makes counters on `host`, the CPU device of a worker."""
        self._host = host
        self._counters: list[tuple[str, tf.Variable]] = []
        self._eager: dict[str, tf.Variable] = {}

    def timed(self, group: Group, label: str) -> "TimedGroup":
        """`group`, with what it reduces from now on timed under `label`."""
        return TimedGroup(group, self, label)

    def by_label(self) -> dict[str, Durations]:
        """What was taken since the start, by label. To be called eagerly."""
        totals: dict[str, Durations] = {}
        for label, counter in self._counters:
            spent = Durations(*(nanoseconds / 1e9 for nanoseconds in counter.numpy().tolist()[:3]))
            totals[label] = totals.get(label, Durations()) + spent
        return totals

    def new_counter(self, label: str) -> tf.Variable:
        """A variable of a bucket: nanoseconds of encoding, exchange and decoding, and when the last of them ended."""
        if tf.executing_eagerly() and label in self._eager:
            return self._eager[label]  # eagerly buckets follow each other, in every step anew
        with tf.init_scope(), tf.device(self._host):
            counter = ResourceVariable(tf.zeros([4], tf.int64), trainable=False, name="stopwatch")
        self._counters.append((label, counter))
        if tf.executing_eagerly():
            self._eager[label] = counter
        return counter

    def start(self, counter: tf.Variable, data: Sequence[tf.Tensor]) -> tf.Tensor:
        """Starts the clock of a bucket when all of `data` is there; returns when that was."""
        with tf.device(self._host):
            *spent, ended = tf.unstack(tf.convert_to_tensor(counter))
            now = self._now(data, ended)
            counter.assign(tf.stack([*spent, now]))
        return now

    def spend(self, counter: tf.Variable, kind: int, data: Sequence[tf.Tensor], start: tf.Tensor) -> None:
        """Counts what has passed since the last count when all of `data` is there; nothing if that was before."""
        now = self._now(data, start)
        with tf.device(self._host):
            *spent, ended = tf.unstack(tf.convert_to_tensor(counter))
            spent[kind] += tf.maximum(now - ended, 0)
            counter.assign(tf.stack([*spent, tf.maximum(now, ended)]))

    def _now(self, data: Sequence[tf.Tensor], never_constant: tf.Tensor) -> tf.Tensor:
        # Of constants alone TensorFlow would compute the time once for all steps.
        samples = [tf.reshape(tensor, [-1])[:1] for tensor in data]
        with tf.device(self._host):
            read = tf.numpy_function(_nanoseconds, [never_constant, *samples], tf.int64, stateful=False)
        return tf.ensure_shape(read, [])


class TimedGroup(Group):
    """A group whose reductions are timed, each from `started` to `finished`."""

    def __init__(self, group: Group, stopwatch: Stopwatch, label: str) -> None:
        self._group, self._stopwatch, self._label = group, stopwatch, label

    @property
    def size(self) -> int:
        return self._group.size

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        self._reached(_ENCODE, tensor)
        result = self._group.sum(tensor)
        self._reached(_EXCHANGE, result)
        return result

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        self._reached(_ENCODE, tensor)
        result = self._group.gather(tensor)
        self._reached(_EXCHANGE, result)
        return result

    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        self._reached(_ENCODE, slices)
        received, position = self._group.exchange(slices)
        self._reached(_EXCHANGE, received)
        return received, position

    def lap(self, gradients: Sequence[tf.Tensor]) -> "_Lap":
        """The group for one bucket of `gradients`."""
        return _Lap(self._group, self._stopwatch, self._label, gradients)

    def _reached(self, kind: int, *data: tf.Tensor) -> None:
        """Counts the time until `data` are there as time of that kind; outside of a lap there is none."""


class _Lap(TimedGroup):
    def __init__(self, group: Group, stopwatch: Stopwatch, label: str, gradients: Sequence[tf.Tensor]) -> None:
        super().__init__(group, stopwatch, label)
        self._counter = stopwatch.new_counter(label)
        self._start = stopwatch.start(self._counter, gradients)

    def end(self, sums: Sequence[tf.Tensor]) -> None:
        self._reached(_DECODE, *sums)

    def _reached(self, kind: int, *data: tf.Tensor) -> None:
        self._stopwatch.spend(self._counter, kind, data, self._start)


def started(group: Group, gradients: Sequence[tf.Tensor]) -> Group:
    """The group to reduce `gradients`, a bucket's, over: `group` itself unless it is a `TimedGroup`."""
    return group.lap(gradients) if isinstance(group, TimedGroup) else group


def finished(group: Group, sums: Sequence[tf.Tensor]) -> None:
    """To be called with what `started` has returned when `sums` are what the reduction was made for."""
    if isinstance(group, _Lap):
        group.end(sums)


def _nanoseconds(*_: Any) -> np.int64:
    return np.int64(time.perf_counter_ns())
