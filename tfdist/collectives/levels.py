"""Two levels of a cluster: the devices of one worker, which are near, and the workers, which are not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.collectives.group import CollectiveGroup
from tfdist.compression.dense import sum_dense
from tfdist.tensorflow_internals.launcher import ReplicaLauncher


@dataclass(frozen=True)
class Levels:
    """The launchers of one replica.

    Attributes:
      all: over all replicas.
      between: over those that compressed gradients travel between: all replicas of a process, or the first replica of
        each worker; `None` on a replica that is not one of them.
      local: over the replicas of this worker where it has several and there are other workers; else `None`.
      number: of this replica among those that compressed gradients travel between.
    """

    all: ReplicaLauncher
    between: ReplicaLauncher | None
    local: ReplicaLauncher | None
    number: int

    def shared_locally(self, tensors: Sequence[Any], options: Any) -> list[Any]:
        """Gives what the worker's first replica has received to the others, whose `tensors` have the same shapes."""
        if self.local is None:
            return list(tensors)
        group = CollectiveGroup(self.local, options=options)
        is_first = self.between is not None
        dense = [tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
        own = dense if is_first else [tf.zeros_like(tensor) for tensor in dense]
        received = iter(_sum_by_dtype(own, group))
        return [
            _shared_rows(tensor, group, is_first) if isinstance(tensor, tf.IndexedSlices) else next(received)
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


def _shared_rows(slices: tf.IndexedSlices, group: CollectiveGroup, is_first: bool) -> tf.IndexedSlices:
    """The slices of the first replica; the others have as many columns, but not as many rows."""
    rows = group.sum(tf.shape(slices.indices) if is_first else tf.zeros([1], tf.int32))
    columns = tf.shape(slices.values)[1:]
    indices = slices.indices if is_first else tf.zeros(rows, slices.indices.dtype)
    values = slices.values if is_first else tf.zeros(tf.concat([rows, columns], axis=0), slices.values.dtype)
    return tf.IndexedSlices(group.sum(values), group.sum(indices), slices.dense_shape)
