"""Two-level reductions: over the devices of one worker, which are near, and over workers, which are not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.collectives.collective_group import CollectiveGroup
from tfdist.compression.compressor import sum_dense
from tfdist.tensorflow_internals.collective_launcher import ReplicaLauncher


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
        received = iter(_sum_by_dtype(contributions, group))
        return [
            _broadcast_rows(tensor, group, is_first) if isinstance(tensor, tf.IndexedSlices) else next(received)
            for tensor in tensors
        ]


def _sum_by_dtype(tensors: Sequence[tf.Tensor], group: CollectiveGroup) -> list[tf.Tensor]:
    results: list[Any] = [None] * len(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        positions = [position for position, tensor in enumerate(tensors) if tensor.dtype == dtype]
        summed = sum_dense([tensors[position] for position in positions], group)
        for position, tensor in zip(positions, summed, strict=True):
            results[position] = tensor
    return results


def _broadcast_rows(slices: tf.IndexedSlices, group: CollectiveGroup, is_first: bool) -> tf.IndexedSlices:
    """Sends the slices of the first replica. Those of other replicas have equal columns, but other numbers of rows."""
    rows = group.sum(tf.shape(slices.indices) if is_first else tf.zeros([1], tf.int32))
    columns = tf.shape(slices.values)[1:]
    indices = slices.indices if is_first else tf.zeros(rows, slices.indices.dtype)
    values = slices.values if is_first else tf.zeros(tf.concat([rows, columns], axis=0), slices.values.dtype)
    return tf.IndexedSlices(group.sum(values), group.sum(indices), slices.dense_shape)
