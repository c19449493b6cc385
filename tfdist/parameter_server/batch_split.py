"""Splits batches by rows into parts, also by the measured speeds of the workers, and describes each to its worker."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras_internals.model_introspection import first_input
from tfdist.load_balancing.share_planning import (
    SHARE,
    LoadBalancing,
    after_step,
    initial_state,
    row_bounds,
    whole_shares,
    within_limits,
)


def split(batch: Any, parts: int, sizes: Sequence[int] | None = None) -> list[Any]:
    """Splits the rows of a batch, in order, into at most `parts` parts of nearly equal size and at least one row.

    With `sizes` the parts have these numbers of rows instead, which may be 0.

    >>> import tensorflow as tf
    >>> [part[0].shape[0] for part in split((tf.zeros([7, 2]),), 3)]
    [3, 2, 2]
    """
    rows = num_rows(batch)
    parts = max(1, min(parts, rows))
    sizes = sizes or [rows // parts + (number < rows % parts) for number in range(parts)]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tf.nest.map_structure(lambda leaf, at=start, n=size: _rows(leaf, at, n), batch))
        start += size
    return pieces


def split_all(batches: Sequence[Any], parts: int) -> list[list[Any]]:
    """Splits several batches into at most `parts` parts each. Returns the pieces of each part.

    >>> import tensorflow as tf
    >>> split = split_all([(tf.zeros([5, 2]),), (tf.zeros([1, 2]),)], 2)
    >>> [[piece[0].shape[0] for piece in part] for part in split]
    [[3, 1], [2]]
    """
    by_batch = [split(batch, parts) for batch in batches]
    return [[pieces[part] for pieces in by_batch if part < len(pieces)] for part in range(max(map(len, by_batch)))]


def split_by(batches: Sequence[Any], sizes_of: Callable[[int], Sequence[int]]) -> list[list[Any]]:
    """Splits several batches into parts of chosen sizes. Returns the pieces of each part; a part without rows has none.

    >>> import tensorflow as tf
    >>> parts = split_by([(tf.zeros([5, 2]),), (tf.zeros([1, 2]),)], lambda rows: [rows - rows // 4, rows // 4])
    >>> [[piece[0].shape[0] for piece in part] for part in parts]
    [[4, 1], [1]]
    """
    by_batch = [split(batch, 1, sizes_of(num_rows(batch))) for batch in batches]
    return [[piece for piece in pieces if num_rows(piece)] for pieces in zip(*by_batch, strict=True)]


def concatenated(*parts: Any) -> Any:
    """Concatenates the rows of outputs."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(parts, 0)


def num_rows(batch: Any) -> int:
    """The number of rows of a batch.

    >>> import tensorflow as tf
    >>> num_rows((tf.zeros([7, 2]), tf.zeros([7])))
    7
    """
    first = first_input(batch)
    rows = first.shape[0]
    return int(tf.shape(first)[0]) if rows is None else int(rows)


def _rows(leaf: Any, start: int, size: int) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.SparseTensor):
        rank = int(leaf.dense_shape.shape[0])
        return tf.sparse.slice(leaf, [start] + [0] * (rank - 1), [size, *leaf.dense_shape.numpy().tolist()[1:]])
    return leaf[start : start + size]


@dataclasses.dataclass(frozen=True)
class PartInfo:
    """Metadata of a part of a push or a round, packed into one tensor for its worker.

    >>> part = PartInfo.unpack(PartInfo(3, 1, 64, [40.0]).pack())
    >>> int(part.number), int(part.buffer), int(part.total), [float(value) for value in part.normalizers]
    (3, 1, 64, [40.0])

    Attributes:
        number: The part's number in this training. Unpacked: an int64 scalar.
        buffer: Index of the gradient buffer that the part is written to in a round. Unpacked: an int32 scalar.
        total: How many samples all parts have together. If the data are made on the workers, the chief does not know
            it; then how many parts there are. Unpacked: an int64 scalar.
        normalizers: Over all parts, what the means in the losses divide by if not by the number of samples. Unpacked:
            float64 scalars.
    """

    number: Any
    buffer: Any
    total: Any
    normalizers: Sequence[Any] = ()

    def pack(self) -> tf.Tensor:
        """Returns an int64 vector."""
        normalizers = np.asarray(self.normalizers, np.float64).view(np.int64)
        return tf.constant([self.number, self.buffer, self.total, *normalizers], tf.int64)

    @staticmethod
    def unpack(tensor: tf.Tensor) -> "PartInfo":
        """Returns what was packed, as scalar tensors."""
        normalizers = tf.unstack(tf.bitcast(tensor[3:], tf.float64))
        return PartInfo(tensor[0], tf.cast(tensor[1], tf.int32), tensor[2], normalizers)


# Each size of a part is a trace of the step, which stays: 16 units make at most 16 of them.
_UNITS = 16


class PartShares:
    """The shares of the workers of a synchronous mode. The chief alone measures and divides."""

    def __init__(self, workers: int, options: LoadBalancing | None) -> None:
        """Begins with equal parts, which stay so without `options`, or the nearest ones within their limits."""
        self._devices, self._options = [1] * workers, options
        limits = [1.0] * workers if options is None else options.limits(workers)
        self._state = initial_state(whole_shares(within_limits(self._devices, limits)))

    @property
    def follows_speeds(self) -> bool:
        """Whether parts follow the measured speeds."""
        return self._options is not None

    @property
    def shares(self) -> tuple[float, ...]:
        """The present share of each worker, as a fraction."""
        return tuple((self._state[SHARE] / self._state[SHARE].sum()).tolist())

    def sizes(self, rows: int) -> list[int]:
        """Returns how many rows of a batch each worker computes.

        >>> PartShares(2, LoadBalancing()).sizes(7)
        [4, 3]
        """
        bounds = row_bounds(self._state[SHARE].astype(int).tolist(), rows)
        return [end - start for start, end in zip(bounds, bounds[1:], strict=False)]

    def add_round(self, interval: float, measured: Mapping[int, tuple[float, int]]) -> None:
        """Adds a round that has ended, and divides again if it is time.

        `interval` are the seconds from when its parts were scheduled until the last one was done; `measured` are, by
        worker, the seconds and the rows of its part, without workers whose parts others have computed.
        """
        of_workers = [measured.get(worker, (0.0, 0)) for worker in range(len(self._devices))]
        seconds, rows = np.asarray(of_workers, np.float64).T
        self._state = after_step(self._state, seconds, rows, interval, self._devices, self._options, units=_UNITS)
