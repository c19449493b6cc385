"""A replica group: sums, gathers and exchanges by a launcher, counted."""

from typing import Any

import tensorflow as tf

from tfdist.collectives.byte_counters import OTHER, ByteCounters
from tfdist.compression import Group
from tfdist.tensorflow_internals.collective_launcher import ReplicaLauncher


class CollectiveGroup(Group):
    """A group of replicas. It counts what it sends."""

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
        if self._counters is not None:
            self._counters.add_sum(self._label, tensor, self)
        return self._launcher.sum(tensor, self._options, shape_is_fixed=self._is_fixed(tensor))

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.size == 1:
            return tf.identity(tensor)
        self._count(tensor, self.size - 1)
        return self._launcher.gather(tensor, self._options, shape_is_fixed=self._is_fixed(tensor))

    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if self.size == 1:
            return tf.identity(slices), tf.zeros([], tf.int32)
        # Each row holds the position of its receiver, so that the receiver learns its position.
        message = self.exchange_rows(tf.concat([tf.range(self.size)[:, tf.newaxis], slices], axis=1))
        return message[:, 1:], message[0, 0]

    def exchange_rows(self, rows: tf.Tensor) -> tf.Tensor:
        if self.size == 1:
            return tf.identity(rows)
        if self.may_lose_replicas:
            raise ValueError(
                "Under `elastic` no worker adds up a part of the gradients for the others: it may be lost. Received: a "
                "compressor that calls `exchange` of its group. Expected: `sum` and `gather`, where "
                "`group.may_lose_replicas`. Choose another compressor, or a strategy without `elastic`."
            )
        self._count(rows, (self.size - 1) / self.size)
        return self._launcher.exchange(rows, self._options)

    @property
    def sends_short_sums_at_once(self) -> bool:
        return self._launcher.sends_short_sums_at_once

    @property
    def may_lose_replicas(self) -> bool:
        return self._launcher.may_lose_replicas

    @property
    def adds_rows(self) -> bool:
        return self._launcher.reduces_and_scatters

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        self._count(rows, (self.size - 1) / self.size)
        return self._launcher.reduce_scatter(rows)

    def _is_fixed(self, tensor: tf.Tensor) -> bool:
        return self._shapes_are_fixed or tensor.shape.rank == 0

    def _count(self, tensor: tf.Tensor, copies: float) -> None:
        if self._counters is not None:
            self._counters.add(self._label, tensor, copies)
