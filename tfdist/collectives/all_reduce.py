"""The reduction of one replica: gradients are compressed as the policy says, everything else is summed exactly."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.collectives.buckets import fill_buckets
from tfdist.collectives.byte_counters import GRADIENTS, OTHER, ByteCounters
from tfdist.collectives.collective_group import CollectiveGroup
from tfdist.collectives.compressed_all_reduce import CompressedReduction
from tfdist.collectives.compression_state import CompressionState
from tfdist.collectives.exchange_timer import ExchangeDurations, ExchangeTimer, TimedGroup, begin_bucket, end_bucket
from tfdist.collectives.sparse_all_reduce import sum_indexed_slices
from tfdist.compression import Group, Policy
from tfdist.compression.gradient_tensors import flatten, unflatten, values_of, with_values, zeros_unless
from tfdist.compression.owned_parts import OwnedParts
from tfdist.tensorflow_internals.collective_launcher import ReplicaLauncher

TimeWait = Callable[[Sequence[Any]], tuple[Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]]]]


@dataclass(eq=False)
class ReductionContext:
    """What the local replicas reduce at the moment: gradients or anything else.

    The replicas of a process are traced one after another, so they share one object.

    Attributes:
        time_wait: Called with the tensors of a reduction of anything but gradients; returns those to reduce, and a
            function that is called with the sums, and returns those to use.
        kind: `GRADIENTS` or `OTHER`.
        contributes: Bool scalar, false if this replica has no samples. It then sends zeros in place of what
            backpropagation computed (the mean over no samples is NaN). `None` means that it has samples.
        paths: The unique paths of the variables that the gradients belong to. Without them gradients are not
            compressed.
    """

    time_wait: TimeWait | None = None
    kind: str = OTHER
    contributes: tf.Tensor | None = None
    paths: Sequence[str] | None = None

    @contextmanager
    def of_gradients(self, contributes: tf.Tensor | None = None, paths: Sequence[str] | None = None) -> Iterator[None]:
        """Marks the reductions in this context as exchanges of gradients."""
        self.kind, self.contributes, self.paths = GRADIENTS, contributes, paths
        try:
            yield
        finally:  # eager replicas enter one after another before the first leaves, so nothing earlier is restored
            self.kind, self.contributes, self.paths = OTHER, None, None


@dataclass(frozen=True)
class ReplicaHierarchy:
    """The launchers of one replica.

    Attributes:
        all: The launcher over all replicas.
        cross: The launcher over the replicas that exchange compressed gradients: all replicas of a process, or the
            first replica of each worker. `None` on a replica that is not one of them.
        local: The launcher over the replicas of this worker, if it has several and there are other workers; else
            `None`.
        cross_rank: The number of this replica, or of its worker, among the replicas of `cross`.
    """

    all: ReplicaLauncher
    cross: ReplicaLauncher | None
    local: ReplicaLauncher | None
    cross_rank: int

    def broadcast_locally(self, tensors: Sequence[Any], options: Any) -> list[Any]:
        """Sends the `tensors` of the worker's first replica to its other replicas, which pass tensors of equal shapes.

        Returns `tensors` unchanged if there is no local level.
        """
        if self.local is None:
            return list(tensors)
        group = CollectiveGroup(self.local, options=options)
        is_first = self.cross is not None
        dense = [tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
        contributions = dense if is_first else [tf.zeros_like(tensor) for tensor in dense]
        received = iter(sum_tensors(contributions, group, 0))
        return [
            _broadcast_rows(tensor, group, is_first) if isinstance(tensor, tf.IndexedSlices) else next(received)
            for tensor in tensors
        ]


class ReplicaReduction:
    """Reduces lists of tensors of one replica over all replicas.

    Attributes:
        context: What the replica reduces at the moment.
        policy: Chooses how gradients are compressed; `None` if none are.
        counters: Count what this replica sends, by compression method.
    """

    def __init__(
        self,
        hierarchy: ReplicaHierarchy,
        context: ReductionContext,
        bucket_bytes: int,
        policy: Policy | None = None,
        state: CompressionState | None = None,
        counters: ByteCounters | None = None,
    ) -> None:
        """Reduces with the launchers of `hierarchy`; see `fill_buckets` for `bucket_bytes`.

        `counters` are those of another reduction, if this one counts in the same.
        """
        self._hierarchy = hierarchy
        self.context = context
        self._bucket_bytes = bucket_bytes
        self.policy = policy if policy is not None and policy.compresses else None
        self._state = state or CompressionState()
        self.counters = counters or ByteCounters(hierarchy.all.host)
        self._timer: ExchangeTimer | None = None

    def measure_durations(self, enabled: bool) -> None:
        """Sets whether functions that are traced from now on measure durations, starting from zero."""
        self._timer = ExchangeTimer(self._hierarchy.all.host) if enabled else None

    def durations_by_method(self) -> dict[str, ExchangeDurations]:
        """Returns the durations since `measure_durations(True)`, by compression method. Call this eagerly."""
        return {} if self._timer is None else self._timer.by_label()

    def __call__(self, tensors: Sequence[Any], *, mean: bool, options: Any) -> list[Any]:
        """Sums (or averages) each of `tensors`, dense or `tf.IndexedSlices`, over all replicas."""
        context, everyone = self.context, self._hierarchy.all
        ended: Callable[[Sequence[Any]], Sequence[Any]] | None = None
        if context.kind != GRADIENTS and context.time_wait is not None:
            tensors, ended = context.time_wait(tensors)
        if context.kind == GRADIENTS:
            self.counters.add_update()
        if context.kind == GRADIENTS and context.paths is not None and self.policy is not None:
            reduced = self._sum_compressed(self.policy, tensors, context.paths, options)
        else:
            group = self._group(everyone, context.kind, options)
            if context.kind == GRADIENTS:
                self._count_dense(tensors, group, context.paths or ())
            reduced = sum_tensors(tensors, group, self._bucket_bytes, context.contributes)
        if ended is not None:
            reduced = list(ended(reduced))
        return [with_values(tensor, values_of(tensor) / everyone.size) for tensor in reduced] if mean else reduced

    def in_background(self, launcher: ReplicaLauncher) -> "ReplicaReduction":
        """Returns a reduction by `launcher`, between workers' first devices, that counts in the same counters."""
        hierarchy = ReplicaHierarchy(launcher, launcher, None, self._hierarchy.cross_rank)
        return ReplicaReduction(
            hierarchy, ReductionContext(), self._bucket_bytes, self.policy, self._state, self.counters
        )

    @property
    def is_first_of_worker(self) -> bool:
        """Whether this is the reduction of the device that exchanges with other workers for its own."""
        return self._hierarchy.cross is not None

    def from_first_device(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors of the worker's first device; the others pass tensors of equal shapes."""
        return self._hierarchy.broadcast_locally(tensors, None)

    def sum_of_workers(self, tensors: Sequence[tf.Tensor], paths: Sequence[str]) -> list[tf.Tensor]:
        """Sums `tensors` of the workers' first devices, compressed by the policy; all devices of workers get the sums.

        They are dense, of the shapes of the variables at `paths`, and equal on all devices of a worker.
        """
        cross, sums = self._hierarchy.cross, list(tensors)
        if cross is not None and self.policy is not None:
            sums = self._sum_by_policy(cross, self.policy, tensors, paths)
        elif cross is not None:
            everyone = self._group(cross, GRADIENTS, None)
            self._count_dense(tensors, everyone, paths)
            sums = sum_tensors(tensors, everyone, self._bucket_bytes)
        return self._hierarchy.broadcast_locally(sums, None)

    def share_of_worker(self, samples: tf.Tensor) -> tf.Tensor:
        """Returns this worker's share of the samples of all workers, or equal shares if nobody has any.

        Workers count that take part: some may be lost.

        `samples` is a float32 scalar that is equal on all devices of a worker.
        """
        cross, share = self._hierarchy.cross, samples
        if cross is not None:
            total, workers = tf.unstack(self._group(cross, OTHER, None).sum(tf.stack([samples, 1.0])))
            share = tf.where(total > 0, tf.math.divide_no_nan(samples, total), 1 / workers)
        return self._hierarchy.broadcast_locally([share], None)[0]

    def gradient_group(self, tensors: Sequence[Any]) -> Group:
        """Returns all replicas as a group that counts gradients, for one update that exchanges `tensors` itself.

        These are in the order of `context.paths`; there are none if `scatter_compressed` exchanges them.
        """
        group = self._group(self._hierarchy.all, GRADIENTS, None)
        if tensors:
            self.counters.add_update()
            self._count_dense(tensors, group, self.context.paths or ())
        return group

    def scatter_compressed(self, tensors: Sequence[Any], parts: OwnedParts) -> list[Any]:
        """Returns the sums of gradients over all replicas, compressed by `policy`: the own parts of dense ones, flat.

        Between workers with several devices whole sums are exchanged, of which parts are taken.
        """
        assert self.policy is not None
        self.counters.add_update()
        paths, cross = self.context.paths or (), self._hierarchy.cross
        # Not `local is None`: a worker with one device has no local level, but exchanges with first devices of others.
        is_flat = cross is not None and cross.size == self._hierarchy.all.size
        sums = self._sum_compressed(self.policy, tensors, paths, None, parts if is_flat else None)
        if is_flat:
            return sums
        dense = [index for index, summed in enumerate(sums) if not isinstance(summed, tf.IndexedSlices)]
        own_parts = parts.of(dense).own_of([sums[index] for index in dense]) if dense else []
        for index, part in zip(dense, own_parts, strict=True):
            sums[index] = part
        return sums

    def _sum_compressed(
        self,
        policy: Policy,
        tensors: Sequence[Any],
        paths: Sequence[str],
        options: Any,
        parts: OwnedParts | None = None,
    ) -> list[Any]:
        tensors = [zeros_unless(self.context.contributes, tensor) for tensor in tensors]
        local, cross = self._hierarchy.local, self._hierarchy.cross
        if local is not None:
            tensors = sum_tensors(tensors, CollectiveGroup(local, options=options), self._bucket_bytes)
        if cross is not None:
            tensors = self._sum_by_policy(cross, policy, tensors, paths, options, parts)
        return self._hierarchy.broadcast_locally(tensors, options)

    def _sum_by_policy(
        self,
        cross: ReplicaLauncher,
        policy: Policy,
        tensors: Sequence[Any],
        paths: Sequence[str],
        options: Any = None,
        parts: OwnedParts | None = None,
    ) -> list[Any]:
        state = self._state.replica_state(self._hierarchy.cross_rank, cross.device)
        group = functools.partial(self._group, cross, options=options)
        return CompressedReduction(policy, state, self.counters, self._bucket_bytes, group)(tensors, paths, parts)

    def _group(self, launcher: ReplicaLauncher, label: str, options: Any) -> Group:
        group = CollectiveGroup(launcher, self.counters, label, options)
        timer = self._timer if label != OTHER and group.size > 1 else None
        return group if timer is None else TimedGroup(group, timer, label)

    def _count_dense(self, tensors: Sequence[Any], group: Group, paths: Sequence[str]) -> None:
        for tensor, path in zip(tensors, paths, strict=False):
            self.counters.record_size(GRADIENTS, path, tensor.shape)
        slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
        dense = [tf.convert_to_tensor(tensor) for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
        for bucket in fill_buckets(dense, self._bucket_bytes):
            self.counters.add_dense_sum(GRADIENTS, [dense[position] for position in bucket], group)
        if slices:
            parts = [part for rows in slices for part in (rows.values, rows.indices)]
            self.counters.add_dense(GRADIENTS, parts, group.size - 1)


def sum_tensors(
    tensors: Sequence[Any], group: Group, bucket_bytes: int, contributes: tf.Tensor | None = None
) -> list[Any]:
    """Sums each of `tensors`, dense ones and `tf.IndexedSlices`, over `group`; see `fill_buckets` and `of_gradients`.

    Except for the number of rows of slices, their shapes are equal on all replicas.
    """
    results: list[Any] = [None] * len(tensors)
    dense = [position for position, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    dense_tensors = [tf.convert_to_tensor(tensors[position]) for position in dense]
    for bucket in fill_buckets(dense_tensors, bucket_bytes):
        members = [dense_tensors[position] for position in bucket]
        timed, members = begin_bucket(group, members)
        # A condition around the packing costs nothing; a selection value by value is one more pass over the data.
        sums = end_bucket(timed, unflatten(timed.sum(zeros_unless(contributes, flatten(members))), members))
        for position, tensor in zip(bucket, sums, strict=True):
            results[dense[position]] = tensor
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            timed, (values,) = begin_bucket(group, [zeros_unless(contributes, tensor.values)])
            summed = sum_indexed_slices(with_values(tensor, values), timed)
            results[position] = with_values(summed, *end_bucket(timed, [summed.values]))
    return results


def _broadcast_rows(slices: tf.IndexedSlices, group: CollectiveGroup, is_first: bool) -> tf.IndexedSlices:
    """Sends the slices of the first replica. Those of other replicas have equal columns, but other numbers of rows."""
    rows = group.sum(tf.shape(slices.indices) if is_first else tf.zeros([1], tf.int32))
    columns = tf.shape(slices.values)[1:]
    indices = slices.indices if is_first else tf.zeros(rows, slices.indices.dtype)
    values = slices.values if is_first else tf.zeros(tf.concat([rows, columns], axis=0), slices.values.dtype)
    return tf.IndexedSlices(group.sum(values), group.sum(indices), slices.dense_shape)
