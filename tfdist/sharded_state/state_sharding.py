"""The sharding of a strategy: its replicas, and how the slots of its optimizers are split over them."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReplicaReduction
from tfdist.sharded_state.layout import SpanLayout
from tfdist.sharded_state.part_gathers import Meeting, PartGathers, replicas_by_position
from tfdist.sharded_state.sharded_state_options import ShardedState


class StateSharding:
    """Splits the slots of the optimizers of one strategy over its replicas.

    Attributes:
        devices: The devices of the replicas of this process.
        first: The number of the first of them over all workers.
        replicas: The number of the replica at each position of the group of all replicas.
        gather: Gathers whole slots outside of steps.
        options: What is split.
    """

    def __init__(self, strategy: Any, bucket_bytes: int, name: str, options: ShardedState) -> None:
        """Splits over the replicas of `strategy`. All workers call this.

        Args:
            strategy: A mirrored strategy of tfdist.
            bucket_bytes: See `fill_buckets`.
            name: A name that is unique in the cluster.
            options: What is split.
        """
        self.options = options
        operations = strategy.extended.replica_operations
        self._operations = operations
        self._bucket_bytes = bucket_bytes
        self.devices: Sequence[str] = [launcher.device for launcher in operations.launchers]
        self.first = sum(strategy.replicas_of_workers[: strategy.rank])
        self.replicas = replicas_by_position(operations.launchers, self.first)
        meeting = Meeting(name, strategy.rank, strategy.num_workers)
        self.gather = PartGathers(operations.launchers, self.replicas, meeting)

    def plan(self, specs: Sequence[tf.TensorSpec], *, is_whole: bool) -> SpanLayout:
        """Returns the layout of variables of these shapes and dtypes. If `is_whole`, each variable has one owner."""
        plan = SpanLayout.plan_whole if is_whole else SpanLayout.plan
        return plan(specs, len(self.replicas), self._bucket_bytes)

    def reduction(self, local_replica: int) -> ReplicaReduction:
        """Returns the reduction of a replica of this process."""
        return self._operations.reductions[local_replica]
