"""The reduction of one replica: gradients as the policy says, everything else exactly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.collectives.buckets import fill_buckets
from tfdist.collectives.compressed import CompressedReduction
from tfdist.collectives.group import CollectiveGroup, Group
from tfdist.collectives.levels import Levels
from tfdist.collectives.sparse import sum_indexed_slices
from tfdist.collectives.state import CompressionState
from tfdist.collectives.stopwatch import Stopwatch, finished, started
from tfdist.collectives.traffic import GRADIENTS, OTHER, Traffic
from tfdist.compression import Policy
from tfdist.compression.packing import flatten, unflatten
from tfdist.tensorflow_internals.launcher import ReplicaLauncher


class Exchange:
    """What the local replicas are reducing at the moment: gradients or anything else.

    The replicas of a process are traced one after another, so one object serves them all.
    """

    def __init__(self) -> None:
        self.kind = OTHER
        self.contributes: tf.Tensor | None = None
        self.paths: Sequence[str] | None = None

    @contextmanager
    def of_gradients(self, contributes: tf.Tensor | None = None, paths: Sequence[str] | None = None) -> Iterator[None]:
        """Marks the reductions within as exchanges of gradients.

        Args:
          contributes: bool scalar, false where this replica has no samples: then zeros are sent for whatever its
            backpropagation made of nothing (the mean over no samples is NaN). `None` means that it has some.
          paths: of the variables that the gradients belong to, each of them unique; without them gradients are not
            compressed.
        """
        self.kind, self.contributes, self.paths = GRADIENTS, contributes, paths
        try:
            yield
        finally:
            self.kind, self.contributes, self.paths = OTHER, None, None


class ReplicaReduction:
    """Reduces lists of tensors of one replica over all replicas.

    Attributes:
      policy: chooses how gradients are compressed; `None` if none are.
      traffic: counts what is sent.
      stopwatch: takes times, if that was asked for.
    """

    def __init__(
        self,
        levels: Levels,
        exchange: Exchange,
        bucket_bytes: int,
        policy: Policy | None = None,
        state: CompressionState | None = None,
    ) -> None:
        """Reduces with the launchers of `levels`; see `fill_buckets` for `bucket_bytes`."""
        self._levels = levels
        self._exchange = exchange
        self._bucket_bytes = bucket_bytes
        self.policy = policy if policy is not None and policy.compresses else None
        self._state = state or CompressionState()
        self.traffic = Traffic(levels.all.host)
        self.stopwatch: Stopwatch | None = None

    def time(self, enabled: bool) -> None:
        """Whether functions that are traced from now on take times, from zero."""
        self.stopwatch = Stopwatch(self._levels.all.host) if enabled else None

    def __call__(self, tensors: Sequence[Any], *, mean: bool, options: Any) -> list[Any]:
        """Sums (or averages) each of `tensors`, dense or `tf.IndexedSlices`, over all replicas."""
        exchange = self._exchange
        if exchange.kind == GRADIENTS:
            self.traffic.add_update()
        if exchange.kind == GRADIENTS and exchange.paths is not None and self.policy is not None:
            reduced = self._compressed(self.policy, tensors, exchange.paths, options)
        else:
            group = self._group(self._levels.all, exchange.kind, options)
            if exchange.kind == GRADIENTS:
                self._count_dense(tensors, group)
            reduced = sum_tensors(tensors, group, self._bucket_bytes, exchange.contributes)
        return [_divide(tensor, self._levels.all.size) for tensor in reduced] if mean else reduced

    def _compressed(self, policy: Policy, tensors: Sequence[Any], paths: Sequence[str], options: Any) -> list[Any]:
        contributes = self._exchange.contributes
        tensors = [
            tensor if isinstance(tensor, tf.IndexedSlices) else _or_zeros(tf.convert_to_tensor(tensor), contributes)
            for tensor in tensors
        ]
        levels = self._levels
        if levels.local is not None:
            tensors = sum_tensors(tensors, CollectiveGroup(levels.local, options=options), self._bucket_bytes)
        if levels.between is not None:
            between = levels.between
            state = self._state.of_replica(levels.number, between.device)
            reduction = CompressedReduction(
                policy,
                state,
                self.traffic,
                self._bucket_bytes,
                lambda label: self._group(between, label, options),
            )
            tensors = reduction(tensors, paths)
        return levels.shared_locally(tensors, options)

    def _group(self, launcher: ReplicaLauncher, label: str, options: Any) -> Group:
        group = CollectiveGroup(launcher, self.traffic, label, options)
        stopwatch = self.stopwatch if label != OTHER and group.size > 1 else None
        return group if stopwatch is None else stopwatch.timed(group, label)

    def _count_dense(self, tensors: Sequence[Any], group: Group) -> None:
        for tensor, path in zip(tensors, self._exchange.paths or (), strict=False):
            self.traffic.note(GRADIENTS, path, tensor.shape)
        slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
        dense = [tf.convert_to_tensor(tensor) for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
        self.traffic.add_dense(GRADIENTS, dense, 2 * (group.size - 1) / group.size)
        if slices:
            parts = [part for rows in slices for part in (rows.values, rows.indices)]
            self.traffic.add_dense(GRADIENTS, parts, group.size - 1)


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
        lap = started(group, members)
        # A condition around the packing costs nothing; selecting value by value would be one more pass over the data.
        sums = unflatten(lap.sum(_or_zeros(flatten(members), contributes)), members)
        finished(lap, sums)
        for position, tensor in zip(bucket.positions, sums, strict=True):
            results[dense[position]] = tensor
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            lap = started(group, [tensor.values])
            results[position] = sum_indexed_slices(tensor, lap)
            finished(lap, [results[position].values])
    return results


def _or_zeros(tensor: tf.Tensor, contributes: tf.Tensor | None) -> tf.Tensor:
    if contributes is None:
        return tensor
    return tf.cond(contributes, lambda: tf.identity(tensor), lambda: tf.zeros_like(tensor))


def _divide(value: Any, size: int) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values / size, value.indices, value.dense_shape)
    return value / size
