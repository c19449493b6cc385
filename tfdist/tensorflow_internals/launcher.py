"""Launches collectives on one replica: numbered in the graph, so that they work in loops and conditions."""

from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.symbols import CollectiveAllReduce, CollectiveReplicaLauncher, ResourceVariable

_FIRST_KEY_IN_GRAPH = 1 << 24  # TensorFlow numbers eager collectives from 100 upward
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

    def gather(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Concatenates the replicas' tensors, which have one shape, along their first dimension."""
        return self._all_gather(tensor, options)


class AllReduce(CollectiveAllReduce):
    """TensorFlow's cross-device operations with a reduction of tfdist's own in the replica context."""

    def __init__(self, stock: CollectiveAllReduce, reduction: Any) -> None:
        """Takes the place of `stock`, whose group key it goes on using.

        Args:
          stock: the operations that TensorFlow made for a strategy.
          reduction: called as `reduction(launcher)` once a local replica; the result is called as
            `(tensors, mean, options) -> tensors` whenever that replica reduces a flat list.
        """
        super().__init__(
            stock._devices, stock._group_size, stock._options, stock._collective_keys, stock._canonicalize_devices
        )
        group_key = self._collective_keys.get_group_key(self._devices)
        self._launchers = [
            ReplicaLauncher(group_key, self._group_size, self._collective_keys, device, self._options)
            for device in self._devices
        ]
        self._reductions = [reduction(launcher) for launcher in self._launchers]

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
