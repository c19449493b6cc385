"""Collectives of one member of a group without the others: it computes what a worker of N does, and sends nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.collective_launcher import AllReduce, ReplicaLauncher
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable
from tfdist.utils.temporary_values import setting_attributes


class LoopbackLauncher(ReplicaLauncher):
    """Returns, in place of what the members of a group exchange, tensors of the same shapes from this member alone.

    A gather returns as many copies as there are members, an exchange as many of the first row: what N equal members
    send to the first of them. A sum returns the tensor itself, as the members' sums are added by TensorFlow's
    collective, whose time is not measured here; with `adds_up` it is N times the tensor.
    """

    adds_up = False

    def __init__(self, group_key: int, group_size: int, keys: Any, device: str, options: Any) -> None:
        super().__init__(group_key, group_size, keys, device, options)
        # Read from a variable, so that TensorFlow cannot see that members are equal, and decode one of them only.
        with tf.init_scope(), tf.device(self.host):
            self._copies = ResourceVariable(group_size, dtype=tf.int32, trainable=False, name="copies")

    def sum(self, tensor: tf.Tensor, options: Any, *, shape_is_fixed: bool) -> tf.Tensor:
        return tensor * tf.cast(self.size, tensor.dtype) if self.adds_up else tf.identity(tensor)

    def gather(self, tensor: tf.Tensor, options: Any, *, shape_is_fixed: bool) -> tf.Tensor:
        return self._repeated(tensor)

    def exchange(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        return self._repeated(tensor[:1])

    def _repeated(self, tensor: tf.Tensor) -> tf.Tensor:
        times = tf.concat([[self._copies], tf.ones([tensor.shape.rank - 1], tf.int32)], axis=0)
        repeated = tf.tile(tensor, times)
        rows = tensor.shape[0]
        repeated.set_shape([None if rows is None else self.size * rows, *tensor.shape[1:]])
        return repeated

    def join(self) -> None:
        """Does nothing: there is nobody to wait for."""


class _LoopbackAllReduce(AllReduce):
    def _launcher(self, group_key: int, size: int, device: str) -> ReplicaLauncher:
        return LoopbackLauncher(group_key, size, self._collective_keys, device, self._options)


def loopback_launcher(extended: Any, members: int) -> LoopbackLauncher:
    """Returns a launcher of a group of `members` on the first device of a strategy with this `extended`."""
    operations = extended.replica_operations
    device = operations.launchers[0].device
    return LoopbackLauncher(1, members, operations._collective_keys, device, operations._options)


def loop_back(extended: Any, members: int, reduction: Callable[..., Any]) -> None:
    """Makes a strategy without a cluster trace, from now on, the steps of worker 0 of `members`, each with one device.

    `reduction` gets `LoopbackLauncher`s; see `AllReduce`.
    """
    extended._cross_device_ops = _LoopbackAllReduce(extended._cross_device_ops, reduction, 0, (1,) * members)
    extended._replicas_of_workers = (1,) * members


def alone(extended: Any) -> AbstractContextManager[None]:
    """Within this context the strategy has one worker: a batch that it distributes is that of the worker."""
    return setting_attributes(extended, _replicas_of_workers=(1,))
