"""Counts, in the graph, the collectives that one replica executes and their bytes, and bytes between devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import tensorflow as tf

from tfdist.compression import Group
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable
from tfdist.utils.sum_copies import is_short_sum

GRADIENTS = "gradients"
OTHER = "other"
_UPDATES = "updates"

_Counts = TypeVar("_Counts", bound="Counts")


@dataclass(frozen=True)
class Counts:
    """Base of dataclasses of numbers, which are added up, and of which earlier ones are subtracted."""

    def __add__(self, other: Self) -> Self:
        return replace(self, **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, earlier: Self) -> Self:
        """Returns what was counted after `earlier`.

        >>> CommunicationStats(3, 300) - CommunicationStats(1, 100) == CommunicationStats(2, 200)
        True
        """
        return replace(self, **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


def counted_since(earlier: Mapping[str, _Counts], now: Mapping[str, _Counts], none: _Counts) -> dict[str, _Counts]:
    """Returns what was counted by name after `earlier`; `none` is what a name has that is missing."""
    return {name: now.get(name, none) - earlier.get(name, none) for name in {**now, **earlier}}


@dataclass(frozen=True)
class CommunicationStats(Counts):
    """What a replica has passed to collectives so far; under parameter servers, what all workers have pushed.

    Under model parallelism, what all devices have sent to each other. Collectives are not counted there.

    Attributes:
        gradient_collectives: Number of collectives that carried gradients, or of pushes.
        gradient_bytes: Size of the tensors passed to them.
        wire_bytes: Bytes of gradients that this replica has sent. With N replicas an all-reduce sends
            `2 (N - 1) / N` times its tensor (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"), one
            of a short tensor between workers `N - 1` times, as an all-gather; an all-to-all `(N - 1) / N` times.
        dense_bytes: Bytes that it would have sent without compression. Not counted under parameter servers: 0.
        other_collectives: Number of collectives that carried anything else (sample counts, metrics, batch statistics,
            predictions).
        other_bytes: Size of the tensors passed to those.
        updates: Number of optimizer updates for which gradients were reduced or pushed.
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
        """`dense_bytes` divided by `wire_bytes`; 1 while one of them is 0.

        >>> CommunicationStats(wire_bytes=25, dense_bytes=100).compression_ratio
        4.0
        """
        return self.dense_bytes / self.wire_bytes if self.wire_bytes and self.dense_bytes else 1.0


@dataclass(frozen=True)
class LinkStats(Counts):
    """Bytes that one device has sent to another. Scalars, such as losses and norms, are not counted.

    Attributes:
        batch_bytes: Inputs, targets and sample weights, from the process that calls `fit`.
        activation_bytes: Outputs of layers for later stages, with their masks.
        activation_gradient_bytes: Gradients of those outputs.
        weight_gradient_bytes: Gradients of weights that columns sum, or that several stages share.
        weight_bytes: Weights that several stages share, and states of layers that several columns share.
        prediction_bytes: Outputs of the model for metrics, and for the caller of `predict`.
    """

    batch_bytes: int = 0
    activation_bytes: int = 0
    activation_gradient_bytes: int = 0
    weight_gradient_bytes: int = 0
    weight_bytes: int = 0
    prediction_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all.

        >>> LinkStats(batch_bytes=3, weight_bytes=4).total_bytes
        7
        """
        return sum(getattr(self, field.name) for field in fields(self))


class ByteCounters:
    """Counters in the host memory of a worker. They count executions, so they are exact in conditions and loops.

    There is one counter for each label: `OTHER`, or a compression method.
    """

    def __init__(self, host: str) -> None:
        """Creates counters on `host`, the CPU device of a worker."""
        self._host = host
        self._counters: dict[str, tf.Variable] = {}
        self._sizes: dict[str, dict[str, int]] = {}

    def add(self, label: str, tensor: tf.Tensor, copies: float) -> None:
        """Counts one collective over `tensor`, of which this replica sends `copies` times the size."""
        nbytes = _bytes_of(tensor)
        self._add(label, 1, nbytes, _scaled(nbytes, copies), 0)

    def add_sum(self, label: str, tensor: tf.Tensor, group: Group) -> None:
        """Counts one sum of `tensor` over `group`."""
        nbytes = _bytes_of(tensor)
        self._add(label, 1, nbytes, _sent_in_sum(nbytes, group), 0)

    def add_dense_sum(self, label: str, tensors: Sequence[tf.Tensor], group: Group) -> None:
        """Counts what an uncompressed sum of `tensors`, in one bucket, would have sent."""
        self._add(label, 0, 0, 0, _sent_in_sum(sum(_bytes_of(tensor) for tensor in tensors), group))

    def add_dense(self, label: str, tensors: Sequence[tf.Tensor], copies: float) -> None:
        """Counts what an uncompressed exchange of `tensors` would have sent: `copies` times their size."""
        self._add(label, 0, 0, 0, _scaled(sum(_bytes_of(tensor) for tensor in tensors), copies))

    def add_update(self) -> None:
        self._add(_UPDATES, 1, 0, 0, 0)

    def record_size(self, label: str, path: str, shape: tf.TensorShape) -> None:
        """Records that `label` counts the gradient of the variable at `path`, of `shape`."""
        self._sizes.setdefault(label, {})[path] = shape.num_elements() or 0

    def sizes(self) -> dict[str, dict[str, int]]:
        """Returns the number of values of each recorded variable, by label and path."""
        return {label: dict(by_path) for label, by_path in self._sizes.items()}

    def count(self) -> CommunicationStats:
        """Returns what was counted so far. Call this eagerly."""
        total = sum(self.by_label().values(), CommunicationStats())
        if OTHER in self._counters:
            collectives, nbytes, *_ = self._counters[OTHER].numpy().tolist()
            total += CommunicationStats(other_collectives=collectives, other_bytes=nbytes)
        if _UPDATES in self._counters:
            total += CommunicationStats(updates=int(self._counters[_UPDATES][0].numpy()))
        return total

    def by_label(self) -> dict[str, CommunicationStats]:
        """Returns the counts of gradients by label. Call this eagerly."""
        counters = {label: counter for label, counter in self._counters.items() if label not in (OTHER, _UPDATES)}
        return {label: CommunicationStats(*counter.numpy().tolist()) for label, counter in counters.items()}

    def _add(self, label: str, *numbers: "int | tf.Tensor") -> None:
        with tf.device(self._host):
            if label not in self._counters:
                with tf.init_scope():
                    zeros = tf.zeros([len(numbers)], tf.int64)
                    self._counters[label] = ResourceVariable(zeros, trainable=False, name="byte_counters")
            if all(isinstance(number, int) for number in numbers):
                added = tf.constant(numbers, tf.int64)  # one operation
            else:
                added = tf.stack([tf.cast(number, tf.int64) for number in numbers])
            self._counters[label].assign_add(added)


def _bytes_of(tensor: tf.Tensor) -> "int | tf.Tensor":
    elements = tensor.shape.num_elements()
    return (tf.size(tensor, out_type=tf.int64) if elements is None else elements) * tensor.dtype.size


def _sent_in_sum(nbytes: "int | tf.Tensor", group: Group) -> "int | tf.Tensor":
    by_owners = _scaled(nbytes, 2 * (group.size - 1) / group.size)
    if not group.sends_short_sums_at_once:
        return by_owners
    is_short, at_once = is_short_sum(nbytes, group.size), nbytes * (group.size - 1)
    if isinstance(nbytes, int):
        return at_once if is_short else by_owners
    return tf.where(is_short, at_once, by_owners)


def _scaled(nbytes: "int | tf.Tensor", copies: float) -> "int | tf.Tensor":
    if isinstance(nbytes, int):
        return round(nbytes * copies)
    return tf.cast(tf.cast(nbytes, tf.float64) * copies, tf.int64)
