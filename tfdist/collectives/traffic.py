"""Counts the collectives that one replica executes, and their bytes, where they execute: in the graph."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import tensorflow as tf

from tfdist.tensorflow_internals.symbols import ResourceVariable

GRADIENTS = "gradients"
OTHER = "other"
_UPDATES = "updates"


@dataclass(frozen=True)
class TrafficCount:
    """What a replica has handed to collectives so far.

    Attributes:
      gradient_collectives: how many collectives carried gradients.
      gradient_bytes: the size of the tensors given to them.
      wire_bytes: what this replica has sent of gradients: of an all-reduce of N replicas `2 (N - 1) / N` times its
        tensor (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"), of an all-gather `N - 1` times, of
        an all-to-all `(N - 1) / N` times.
      dense_bytes: what it would have sent without compression.
      other_collectives: how many carried anything else (sample counts, metrics, batch statistics, predictions).
      other_bytes: the size of the tensors given to those.
      updates: for how many updates of an optimizer gradients were reduced.
    """

    gradient_collectives: int = 0
    gradient_bytes: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    other_collectives: int = 0
    other_bytes: int = 0
    updates: int = 0

    @property
    def compression_ratio(self) -> float:
        """How many bytes of gradients stand for one that was sent; 1 before the first.

        >>> TrafficCount(wire_bytes=25, dense_bytes=100).compression_ratio
        4.0
        """
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def __add__(self, other: "TrafficCount") -> "TrafficCount":
        return TrafficCount(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, earlier: "TrafficCount") -> "TrafficCount":
        """What came after `earlier`.

        >>> TrafficCount(3, 300) - TrafficCount(1, 100) == TrafficCount(2, 200)
        True
        """
        return TrafficCount(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class Traffic:
    """Counters in the host memory of a worker: exact also in conditions and loops, as they count executions.

    They are kept by labels: `OTHER`, or else a group of variables whose gradients travel alike.
    """

    def __init__(self, host: str) -> None:
        """Makes counters on `host`, the CPU device of a worker."""
        self._host = host
        self._counters: dict[str, tf.Variable] = {}
        self._values: dict[str, dict[str, int]] = {}

    def add(self, label: str, tensor: tf.Tensor, copies: float) -> None:
        """Counts one collective over `tensor`, of which this replica sends `copies` times its size."""
        nbytes = _bytes_of(tensor)
        self._add(label, 1, nbytes, _scaled(nbytes, copies), 0)

    def add_dense(self, label: str, tensors: Sequence[tf.Tensor], copies: float) -> None:
        """Counts what an uncompressed exchange of `tensors` would have sent: `copies` times their size."""
        self._add(label, 0, 0, 0, _scaled(sum(_bytes_of(tensor) for tensor in tensors), copies))

    def add_update(self) -> None:
        """Counts one reduction of all gradients of an update."""
        self._add(_UPDATES, 1, 0, 0, 0)

    def note(self, label: str, path: str, shape: tf.TensorShape) -> None:
        """Remembers that the gradient of the variable at `path`, of `shape`, is counted under `label`."""
        self._values.setdefault(label, {})[path] = shape.num_elements() or 0

    def values(self) -> dict[str, dict[str, int]]:
        """How many values the variables have whose gradients are counted, by label and path."""
        return {label: dict(by_path) for label, by_path in self._values.items()}

    def count(self) -> TrafficCount:
        """What was counted since the start. To be called eagerly."""
        total = sum(self.by_label().values(), TrafficCount())
        if OTHER in self._counters:
            collectives, nbytes, *_ = self._counters[OTHER].numpy().tolist()
            total += TrafficCount(other_collectives=collectives, other_bytes=nbytes)
        if _UPDATES in self._counters:
            total += TrafficCount(updates=int(self._counters[_UPDATES][0].numpy()))
        return total

    def by_label(self) -> dict[str, TrafficCount]:
        """What was counted of gradients, by label. To be called eagerly."""
        counters = {label: counter for label, counter in self._counters.items() if label not in (OTHER, _UPDATES)}
        return {label: TrafficCount(*counter.numpy().tolist()) for label, counter in counters.items()}

    def _add(self, label: str, *numbers: "int | tf.Tensor") -> None:
        with tf.device(self._host):
            if label not in self._counters:
                with tf.init_scope():
                    zeros = tf.zeros([len(numbers)], tf.int64)
                    self._counters[label] = ResourceVariable(zeros, trainable=False, name="traffic")
            self._counters[label].assign_add(tf.stack([tf.cast(number, tf.int64) for number in numbers]))


def _bytes_of(tensor: tf.Tensor) -> "int | tf.Tensor":
    elements = tensor.shape.num_elements()
    return (tf.size(tensor, out_type=tf.int64) if elements is None else elements) * tensor.dtype.size


def _scaled(nbytes: "int | tf.Tensor", copies: float) -> "int | tf.Tensor":
    if isinstance(nbytes, int):
        return round(nbytes * copies)
    return tf.cast(tf.cast(nbytes, tf.float64) * copies, tf.int64)
