"""The reduction of one replica: dense tensors in buckets, sparse ones by their rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.collectives.buckets import fill_buckets, flatten, unflatten
from tfdist.collectives.group import CollectiveGroup, Group
from tfdist.collectives.sparse import sum_indexed_slices
from tfdist.collectives.traffic import GRADIENTS, OTHER, Traffic
from tfdist.tensorflow_internals.launcher import ReplicaLauncher


class Exchange:
    """What the local replicas are reducing at the moment: gradients or anything else.

    The replicas of a process are traced one after another, so one object serves them all.
    """

    def __init__(self) -> None:
        self.kind = OTHER
        self.contributes: tf.Tensor | None = None

    @contextmanager
    def of_gradients(self, contributes: tf.Tensor | None = None) -> Iterator[None]:
        """Marks the reductions within as exchanges of gradients.

        Args:
          contributes: bool scalar, false where this replica has no samples: then zeros are sent for whatever its
            backpropagation made of nothing (the mean over no samples is NaN). `None` means that it has some.
        """
        self.kind, self.contributes = GRADIENTS, contributes
        try:
            yield
        finally:
            self.kind, self.contributes = OTHER, None


class ReplicaReduction:
    """Reduces lists of tensors of one replica over all replicas."""

    def __init__(self, launcher: ReplicaLauncher, exchange: Exchange, bucket_bytes: int) -> None:
        """Reduces with `launcher`; see `fill_buckets` for `bucket_bytes`."""
        self._launcher = launcher
        self._exchange = exchange
        self._bucket_bytes = bucket_bytes
        self.traffic = Traffic(launcher.host)

    def __call__(self, tensors: Sequence[Any], *, mean: bool, options: Any) -> list[Any]:
        """Sums (or averages) each of `tensors`, dense or `tf.IndexedSlices`, over all replicas."""
        group = CollectiveGroup(self._launcher, self.traffic, self._exchange.kind, options)
        reduced = sum_tensors(tensors, group, self._bucket_bytes, self._exchange.contributes)
        return [_divide(tensor, group.size) for tensor in reduced] if mean else reduced


def sum_tensors(
    tensors: Sequence[Any], group: Group, bucket_bytes: int, contributes: tf.Tensor | None = None
) -> list[Any]:
    """Sums each of `tensors` over `group`.

    Args:
      tensors: dense tensors and `tf.IndexedSlices`, of the same shapes (but for the rows of the slices) on all
        replicas.
      group: the replicas that take part.
      bucket_bytes: see `fill_buckets`.
      contributes: see `Exchange.of_gradients`.

    Returns:
      The sums in the order of `tensors`.
    """
    results: list[Any] = [None] * len(tensors)
    dense = [position for position, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    dense_tensors = [tf.convert_to_tensor(tensors[position]) for position in dense]
    for bucket in fill_buckets(dense_tensors, bucket_bytes):
        members = [dense_tensors[position] for position in bucket.positions]
        summed = group.sum(_packed(members, contributes))
        for position, tensor in zip(bucket.positions, unflatten(summed, members), strict=True):
            results[dense[position]] = tensor
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[position] = sum_indexed_slices(tensor, group)
    return results


def _packed(members: Sequence[tf.Tensor], contributes: tf.Tensor | None) -> tf.Tensor:
    if contributes is None:
        return flatten(members)
    # A condition around the packing costs nothing; selecting element by element would be one more pass over the data.
    return tf.cond(contributes, lambda: flatten(members), lambda: tf.zeros_like(flatten(members)))


def _divide(value: Any, size: int) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values / size, value.indices, value.dense_shape)
    return value / size
