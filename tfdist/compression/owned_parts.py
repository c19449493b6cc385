"""The values of gradients that each replica of a group owns, where sums are not needed everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from tfdist.compression.gradient_tensors import flatten


class Span(NamedTuple):
    """The values `start` to `stop`, without it, of a flattened variable."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of values."""
        return self.stop - self.start


@dataclass(frozen=True)
class OwnedParts:
    """The parts of some gradients.

    Attributes:
        spans: The span of each gradient that belongs to the replica at each position of the group.
        own: The position of this replica.
        block: The number of values of a block. A part fills complete blocks, so no block has values of two gradients.

    >>> import tensorflow as tf
    >>> parts = OwnedParts(((Span(0, 2), Span(2, 3)), (Span(0, 0), Span(0, 2))), own=1)
    >>> rows = parts.rows([tf.constant([1, 2, 3]), tf.constant([[4], [5]])])
    >>> rows.numpy().tolist()
    [[1, 2, 0], [3, 4, 5]]
    >>> [part.numpy().tolist() for part in parts.split(rows[1])]
    [[3], [4, 5]]
    """

    spans: tuple[tuple[Span, ...], ...]
    own: int
    block: int = 1

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self.spans[0])

    @property
    def length(self) -> int:
        """The length of a row."""
        return max(sum(self._filled(position)) for position in range(self.size))

    @property
    def is_balanced(self) -> bool:
        """Whether rows, which are filled up to the longest one, have at most twice the values of the gradients."""
        sizes = [sum(spans[position].size for spans in self.spans) for position in range(self.size)]
        return self.size * max(sizes) <= 2 * sum(sizes)

    def of(self, chosen: Sequence[int], block: int = 1) -> "OwnedParts":
        """Returns the parts of the chosen gradients, in rows of complete blocks of `block` values."""
        return OwnedParts(tuple(self.spans[index] for index in chosen), self.own, block)

    def rows(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the parts of all replicas, `[size, length]`, filled up with zeros."""
        flat = [tf.reshape(gradient, [-1]) for gradient in gradients]
        rows = []
        for position in range(self.size):
            pieces = []
            for vector, spans, filled in zip(flat, self.spans, self._filled(position), strict=True):
                start, stop = spans[position]
                pieces += [vector[start:stop], tf.zeros([filled - (stop - start)], vector.dtype)]
            pieces.append(tf.zeros([self.length - sum(self._filled(position))], flat[0].dtype))
            rows.append(flatten([piece for piece in pieces if piece.shape[0]] or pieces[:1]))
        return tf.stack(rows)

    def split(self, row: tf.Tensor) -> list[tf.Tensor]:
        """Splits the row of this replica into the parts of the gradients, flat."""
        return self._pieces(row, self.own)

    def whole(self, rows: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
        """Returns the gradients, of `shapes`, that `rows` has split."""
        by_position = [self._pieces(row, position) for position, row in enumerate(tf.unstack(rows, num=self.size))]
        return [
            tf.reshape(tf.concat(pieces, axis=0), shape)
            for pieces, shape in zip(zip(*by_position, strict=True), shapes, strict=True)
        ]

    def own_of(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the parts of whole gradients that this replica owns, flat."""
        pairs = zip(gradients, self.spans, strict=True)
        return [tf.reshape(gradient, [-1])[slice(*spans[self.own])] for gradient, spans in pairs]

    def _filled(self, position: int) -> list[int]:
        """The lengths of the pieces of a row, which are filled up to complete blocks."""
        return [-(-spans[position].size // self.block) * self.block for spans in self.spans]

    def _pieces(self, row: tf.Tensor, position: int) -> list[tf.Tensor]:
        pieces, begin = [], 0
        for spans, filled in zip(self.spans, self._filled(position), strict=True):
            pieces.append(row[begin : begin + spans[position].size])
            begin += filled
        return pieces
