"""Functions of a replica group: how a tensor is summed (at once, in pieces, or gathered and added) and gathered."""

from typing import Any

import tensorflow as tf

from tfdist.collectives.byte_counters import OTHER, ByteCounters
from tfdist.compression import Group
from tfdist.tensorflow_internals.collective_launcher import ReplicaLauncher

# A collective of TensorFlow sends, receives and adds one after the other, so several run at once.
_PIECE_BYTES = 2 * 2**20
# Two replicas gather a short tensor and add it themselves: one exchange, where an all-reduce needs two.
_SHORT_BYTES = 64 * 2**10


class CollectiveGroup(Group):
    """A group of replicas over TensorFlow's collectives. It counts what it sends."""

    def __init__(
        self, launcher: ReplicaLauncher, counters: ByteCounters | None = None, label: str = OTHER, options: Any = None
    ) -> None:
        """Groups the replicas of `launcher`; counts under `label` of `counters`, if any."""
        self._launcher = launcher
        self._counters = counters
        self._label = label
        self._options = options
        # Gradients have the static shapes of variables.
        self._shapes_are_fixed = label != OTHER

    @property
    def size(self) -> int:
        return self._launcher.size

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.size == 1:
            return tf.identity(tensor)
        self._count(tensor, 2 * (self.size - 1) / self.size)
        nbytes = _static_bytes(tensor)
        if (
            self._launcher.sends_at_once
            and self.size == 2
            and nbytes is not None
            and 0 < nbytes <= _SHORT_BYTES
            and _can_be_gathered(tensor)
        ):
            both = self._gathered(tf.reshape(tensor, [1, -1]))
            return tf.reshape(tf.add(*tf.unstack(both, num=2)), tensor.shape)
        if nbytes is None or nbytes <= _PIECE_BYTES or not self._launcher.sends_at_once:
            return self._summed(tensor)
        pieces = _pieces(tf.reshape(tensor, [-1]), axis=0)
        summed = [self._summed(piece) for piece in pieces]
        return tf.reshape(tf.concat(summed, axis=0), tensor.shape)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.size == 1:
            return tf.identity(tensor)
        self._count(tensor, self.size - 1)
        nbytes = _static_bytes(tensor)
        if nbytes is None or nbytes <= _PIECE_BYTES or not self._launcher.sends_at_once:
            return self._gathered(tensor)
        pieces = _pieces(tf.reshape(tensor, [1, -1]), axis=1)
        gathered = tf.concat([self._gathered(piece) for piece in pieces], axis=1)
        return tf.reshape(gathered, [self.size * tensor.shape[0], *tensor.shape[1:]])

    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if self.size == 1:
            return tf.identity(slices), tf.zeros([], tf.int32)
        # Each row holds the position of its receiver, so that the receiver learns its position.
        message = self.exchange_rows(tf.concat([tf.range(self.size)[:, tf.newaxis], slices], axis=1))
        return message[:, 1:], message[0, 0]

    def exchange_rows(self, rows: tf.Tensor) -> tf.Tensor:
        if self.size == 1:
            return tf.identity(rows)
        self._count(rows, (self.size - 1) / self.size)
        pieces = _pieces(rows, axis=1) if self._launcher.sends_at_once else [rows]
        received = [self._launcher.exchange(piece, self._options) for piece in pieces]
        return tf.concat(received, axis=1) if len(received) > 1 else received[0]

    @property
    def adds_rows(self) -> bool:
        return self._launcher.reduces_and_scatters

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        self._count(rows, (self.size - 1) / self.size)
        return self._launcher.reduce_scatter(rows)

    def _summed(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._launcher.sum(tensor, self._options, shape_is_fixed=self._is_fixed(tensor))

    def _gathered(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._launcher.gather(tensor, self._options, shape_is_fixed=self._is_fixed(tensor))

    def _is_fixed(self, tensor: tf.Tensor) -> bool:
        return self._shapes_are_fixed or tensor.shape.rank == 0

    def _count(self, tensor: tf.Tensor, copies: float) -> None:
        if self._counters is not None:
            self._counters.add(self._label, tensor, copies)


def _static_bytes(tensor: tf.Tensor) -> int | None:
    elements = tensor.shape.num_elements()
    return None if elements is None else elements * tensor.dtype.size


def _can_be_gathered(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.float32, tf.float16, tf.int32, tf.int64)


def _pieces(matrix: tf.Tensor, axis: int) -> list[tf.Tensor]:
    """Splits `matrix` along `axis` into pieces of about `_PIECE_BYTES`."""
    length = matrix.shape[axis]
    nbytes = _static_bytes(matrix)
    if length is None or nbytes is None:
        return [matrix]
    sizes = piece_lengths(length, nbytes)
    return tf.split(matrix, sizes, axis=axis) if len(sizes) > 1 else [matrix]


def piece_lengths(length: int, nbytes: int) -> list[int]:
    """Returns the lengths of the pieces in which `length` values, of `nbytes` in all, are sent."""
    count = max(1, min(length, -(-nbytes // _PIECE_BYTES)))
    return [length // count + (index < length % count) for index in range(count)]
