"""Times, in the graph, the encoding, the exchange and the decoding of gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.collectives.byte_counters import Counts
from tfdist.compression import Group
from tfdist.tensorflow_internals.operation_order import after_clocks, read_clock
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

_ENCODE, _EXCHANGE, _DECODE = range(3)


@dataclass(frozen=True)
class ExchangeDurations(Counts):
    """Time spent on buckets of gradients, added up. Buckets overlap each other and the computation.

    Attributes:
        encode_seconds: Time from a bucket's ready gradients to its first collective, and between its collectives.
        exchange_seconds: Time in collectives, including the time to wait for other replicas.
        decode_seconds: Time from the result of the last collective to the sums.
    """

    encode_seconds: float = 0.0
    exchange_seconds: float = 0.0
    decode_seconds: float = 0.0


class ExchangeTimer:
    """Times the buckets of one replica. Each bucket has a counter in the host memory of the worker.

    What follows a reading of the clock in a bucket waits for it; other buckets and the computation do not.
    """

    def __init__(self, host: str) -> None:
        """Creates counters on `host`, the CPU device of a worker."""
        self._host = host
        self._counters: list[tuple[str, tf.Variable]] = []
        self._eager: dict[str, tf.Variable] = {}

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

    def start(self, counter: tf.Variable, data: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Starts the clock of a bucket when all of `data` is computed; returns that time, and the data after it."""
        with tf.device(self._host):
            *spent, ended = tf.unstack(tf.convert_to_tensor(counter))
            now = read_clock([*data, ended], self._host)
            counter.assign(tf.stack([*spent, now]))
        return now, after_clocks([now], data)

    def add_elapsed(
        self, counter: tf.Variable, kind: int, data: Sequence[tf.Tensor], start: tf.Tensor
    ) -> list[tf.Tensor]:
        """Adds the time from the last reading until all of `data` is computed; nothing if that was earlier.

        Returns `data` after the reading of the clock.
        """
        now = read_clock([*data, start], self._host)
        with tf.device(self._host):
            *spent, ended = tf.unstack(tf.convert_to_tensor(counter))
            spent[kind] += tf.maximum(now - ended, 0)
            counter.assign(tf.stack([*spent, tf.maximum(now, ended)]))
        return after_clocks([now], data)


class TimedGroup(Group):
    """A group that times its reductions, from `begin_bucket` to `end_bucket`."""

    counter: tf.Variable | None = None  # that of a bucket
    _start: tf.Tensor

    def __init__(self, group: Group, timer: ExchangeTimer, label: str) -> None:
        self._group, self._timer, self._label = group, timer, label

    @property
    def size(self) -> int:
        return self._group.size

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._timed(_EXCHANGE, self._group.sum(self._timed(_ENCODE, tensor)))

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._timed(_EXCHANGE, self._group.gather(self._timed(_ENCODE, tensor)))

    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        received, position = self._group.exchange(self._timed(_ENCODE, slices))
        return self._timed(_EXCHANGE, received), position

    def exchange_rows(self, rows: tf.Tensor) -> tf.Tensor:
        return self._timed(_EXCHANGE, self._group.exchange_rows(self._timed(_ENCODE, rows)))

    @property
    def may_lose_replicas(self) -> bool:
        return self._group.may_lose_replicas

    @property
    def sends_short_sums_at_once(self) -> bool:
        return self._group.sends_short_sums_at_once

    @property
    def adds_rows(self) -> bool:
        return self._group.adds_rows

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        return self._timed(_EXCHANGE, self._group.reduce_scatter(self._timed(_ENCODE, rows)))

    def bucket(self, gradients: Sequence[tf.Tensor]) -> tuple[Group, list[tf.Tensor]]:
        """Returns the group for one bucket, and its `gradients` from when the clock has started."""
        bucket = TimedGroup(self._group, self._timer, self._label)
        bucket.counter = self._timer.new_counter(self._label)
        bucket._start, clocked = self._timer.start(bucket.counter, gradients)
        return bucket, clocked

    def end(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Ends the timing of a bucket; returns its results to use. Outside of a bucket nothing is timed."""
        return self._add_elapsed(_DECODE, sums)

    def _timed(self, kind: int, tensor: tf.Tensor) -> tf.Tensor:
        return self._add_elapsed(kind, [tensor])[0]

    def _add_elapsed(self, kind: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self.counter is None:
            return list(tensors)
        return self._timer.add_elapsed(self.counter, kind, tensors, self._start)


def begin_bucket(group: Group, gradients: Sequence[tf.Tensor]) -> tuple[Group, list[tf.Tensor]]:
    """Returns the group over which to reduce a bucket of `gradients`, and the gradients to reduce.

    Both are the arguments unless the group is a `TimedGroup`.
    """
    return group.bucket(gradients) if isinstance(group, TimedGroup) else (group, list(gradients))


def end_bucket(group: Group, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Ends the timing that `begin_bucket` began; returns the bucket's results to use."""
    return group.end(sums) if isinstance(group, TimedGroup) else list(sums)
