"""Launches collectives on one replica: numbered in the graph, so that they work in loops and conditions."""

from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.symbols import (
    CollectiveAllReduce,
    CollectiveReplicaLauncher,
    ResourceVariable,
    all_to_all,
)

_FIRST_KEY_IN_GRAPH = 1 << 24  # TensorFlow numbers eager collectives from 100 upward
_AT_ONCE_ON_CPU = 16
_GROUPS_OF_LEVELS = 1 << 8  # TensorFlow numbers the groups of a strategy from its base upward, a few of them
_KEYS_IN_GRAPH = 1 << 30  # after that many the numbers start anew


class ReplicaLauncher(CollectiveReplicaLauncher):
    """TensorFlow's launcher, with instance keys that are drawn when a collective runs.

    Stock TensorFlow feeds the keys of a function's collectives when the function is called. A `tf.while_loop` around
    a nested function cannot be fed (`steps_per_execution` fails: "You must feed a value for placeholder tensor"), and
    a loop would use one key for all its rounds. Here every execution counts a variable of this replica up. All
    replicas execute the same collectives in the same order (automatic control dependencies keep the program's), so
    they draw the same keys.
    """

    def __init__(self, group_key: int, group_size: int, keys: Any, device: str, options: Any) -> None:
        super().__init__(group_key, group_size, keys, device, options)
        self._host = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()
        with tf.init_scope(), tf.device(self._host):
            self._executed = ResourceVariable(0, dtype=tf.int32, trainable=False, name="collectives_executed")
        self._launched = 0
        at_once = _AT_ONCE_ON_CPU if tf.DeviceSpec.from_string(device).device_type == "CPU" else 1
        with tf.init_scope(), tf.device(device):
            self._tokens = [ResourceVariable(0.0, trainable=False, name="ordering_token") for _ in range(at_once)]

    @property
    def size(self) -> int:
        """How many replicas take part."""
        return int(self._group_size)

    @property
    def device(self) -> str:
        """The device of this replica."""
        return str(self._device)

    @property
    def host(self) -> str:
        """The CPU of this replica's worker."""
        return self._host

    def _next_instance_key(self) -> Any:
        if tf.executing_eagerly():
            return super()._next_instance_key()
        with tf.device(self._host):
            executed = self._executed.assign_add(1, read_value=True)
            return _FIRST_KEY_IN_GRAPH + tf.math.floormod(executed, _KEYS_IN_GRAPH)

    def _get_ordering_token(self) -> Any:
        # Collectives with one token run one after the other, as NCCL must have it. On CPUs their keys tell them apart,
        # and several at once keep the link busy; without any token TensorFlow would order those of all replicas.
        self._launched += 1
        return self._tokens[self._launched % len(self._tokens)].handle

    def gather(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Concatenates the replicas' tensors, which have one shape, along their first dimension."""
        return self._all_gather(tensor, options)

    def exchange(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends row `i` of `tensor`, `[size, ...]`, to the replica at position `i`; returns what this one receives."""
        instance_key = self._next_instance_key()
        options = self._options.merge(options)
        with tf.device(self._device):
            return all_to_all(
                tensor,
                self._group_size,
                self._group_key,
                instance_key,
                communication_hint=options.implementation.value,
                timeout=options.timeout_seconds,
                ordering_token=self._get_ordering_token(),
            )


class AllReduce(CollectiveAllReduce):
    """TensorFlow's cross-device operations with a reduction of tfdist's own in the replica context."""

    def __init__(self, stock: CollectiveAllReduce, reduction: Any, rank: int = 0) -> None:
        """Takes the place of `stock`, whose group key it goes on using.

        Args:
          stock: the operations that TensorFlow made for a strategy.
          reduction: called once a local replica with the launchers `(over all replicas, between workers, within this
            worker, number of the replica)`; the result is called as `(tensors, mean, options) -> tensors` whenever
            that replica reduces a flat list.
          rank: of this worker.
        """
        super().__init__(
            stock._devices, stock._group_size, stock._options, stock._collective_keys, stock._canonicalize_devices
        )
        group_key = self._collective_keys.get_group_key(self._devices)
        self._launchers = [self._launcher(group_key, self._group_size, device) for device in self._devices]
        local = len(self._devices)
        workers = self._group_size // local
        if local == 1 or workers == 1:
            self._reductions = [
                reduction(launcher, launcher, None, rank * local + index)
                for index, launcher in enumerate(self._launchers)
            ]
            return
        # One group of the workers' first replicas, and one of each worker's own. Keys are known to the whole cluster.
        between = self._launcher(group_key + _GROUPS_OF_LEVELS, workers, self._devices[0])
        local_key = group_key + _GROUPS_OF_LEVELS + 1 + rank
        self._reductions = [
            reduction(launcher, None if index else between, self._launcher(local_key, local, device), rank)
            for index, (launcher, device) in enumerate(zip(self._launchers, self._devices, strict=True))
        ]

    def _launcher(self, group_key: int, size: int, device: str) -> ReplicaLauncher:
        return ReplicaLauncher(group_key, size, self._collective_keys, device, self._options)

    @property
    def reductions(self) -> list[Any]:
        """What `reduction` returned for each local replica."""
        return self._reductions

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        with tf.device(self._devices[replica_id]):
            reduced = self._reductions[replica_id](
                tf.nest.flatten(value), mean=reduce_op == tf.distribute.ReduceOp.MEAN, options=options
            )
        return tf.nest.pack_sequence_as(value, reduced)
