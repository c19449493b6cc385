"""Launches TensorFlow's collectives on a replica, with instance keys that the graph draws, or without other members."""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.aborted_collectives import sum_of_group
from tfdist.tensorflow_internals.instance_keys import InstanceKeys
from tfdist.tensorflow_internals.operation_order import reject_loop_in_replica
from tfdist.tensorflow_internals.sent_dtypes import GATHERED, as_sum, as_values, as_words, from_words, to_words
from tfdist.tensorflow_internals.tensorflow_symbols import CollectiveAllReduce, Mirrored, ResourceVariable, regroup
from tfdist.tensorflow_internals.workers_launcher import DevicesOfWorkersLauncher, GroupLauncher, WorkersLauncher
from tfdist.tensorflow_internals.xla_functions import (
    CannotCompileError,
    is_compiling,
    reject_exchange_in_compiled_function,
)
from tfdist.utils.temporary_values import setting, setting_attributes

_GROUPS_OF_LEVELS = 1 << 8  # TensorFlow numbers the few groups of a strategy from its base upward
_GROUP_IN_BACKGROUND = 1 << 11  # above those of the levels, of which each worker has one
_KEY_OF_JOINING = 1  # below those of TensorFlow and of `InstanceKeys`


_shapes_are_fixed: contextvars.ContextVar[bool] = contextvars.ContextVar("tfdist_shapes_are_fixed", default=False)


def with_fixed_shapes() -> AbstractContextManager[None]:
    """Within this context replicas trace collectives whose shapes do not depend on their data, so keys are reused.

    TensorFlow keeps a record of each key until the process ends, and workers agree on it in one more round trip.
    """
    return setting(_shapes_are_fixed, True)


class ReplicaLauncher(GroupLauncher):
    """TensorFlow's launcher, with instance keys that are drawn when a collective runs, and reused; see `InstanceKeys`.

    Collectives with the same ordering token run one after the other, as NCCL requires; without a token TensorFlow would
    order those of all replicas of a process.
    """

    def __init__(self, group_key: int, group_size: int, keys: Any, device: str, options: Any) -> None:
        super().__init__(group_key, group_size, keys, device, options)
        self._is_gpu = self.reduces_and_scatters = tf.DeviceSpec.from_string(device).device_type == "GPU"
        with tf.init_scope(), tf.device(device):
            self._token = ResourceVariable(0.0, trainable=False, name="ordering_token")
        self.instance_keys = InstanceKeys(self.host, self._token)
        self._launching: str | None = None

    def sum(self, tensor: tf.Tensor, options: Any, *, shape_is_fixed: bool) -> tf.Tensor:
        """Sums the replicas' tensors, which have the same shape; see `InstanceKeys.next` for `shape_is_fixed`."""
        self._launching = _signature("reduce", tensor, shape_is_fixed)
        return self.all_reduce(tensor, None, options)

    def gather(self, tensor: tf.Tensor, options: Any, *, shape_is_fixed: bool) -> tf.Tensor:
        """Concatenates the replicas' tensors, which have the same shape, along their first dimension."""
        self._launching = _signature("gather", tensor, shape_is_fixed)
        return self._all_gather(tensor, options)

    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> tf.Tensor:
        """Sums tensors of any numeric dtype; see TensorFlow's method."""
        sent, restored = as_sum(tf.convert_to_tensor(input_tensor), by_gpus=self._is_gpu)
        return restored(super().all_reduce(sent, control_input, options))

    def all_gather(self, input_tensor: Any, axis: Any, options: Any = None) -> tf.Tensor:
        """Gathers tensors of any dtype along `axis`; see TensorFlow's method, which transposes them."""
        sent, restored = as_values(tf.convert_to_tensor(input_tensor))
        return restored(super().all_gather(sent, axis, options))

    def _all_gather(self, input_tensor: Any, options: Any) -> tf.Tensor:
        """Gathers tensors of any dtype; see TensorFlow's method."""
        tensor = tf.convert_to_tensor(input_tensor)
        if tensor.dtype in GATHERED:
            return super()._all_gather(tensor, options)
        words, _ = as_words(tensor)
        gathered = super()._all_gather(words[tf.newaxis], options)
        shape = tf.concat([[self.size * tf.shape(tensor)[0]], tf.shape(tensor)[1:]], axis=0)
        whole = tf.reshape(from_words(gathered, tensor.dtype, self.size, tf.size(tensor)), shape)
        rows = None if tensor.shape[0] is None else self.size * tensor.shape[0]
        return tf.ensure_shape(whole, [rows, *tensor.shape[1:]])

    def exchange(self, tensor: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends row `i` of `tensor`, `[size, ...]`, to the replica at position `i`; returns the received rows."""
        self._launching = _signature("exchange", tensor, True)
        instance_key = self._next_instance_key()
        options = self._options.merge(options)
        with tf.device(self._device):
            return tf.raw_ops.CollectiveAllToAllV2(
                input=tensor,
                group_size=self._group_size,
                group_key=self._group_key,
                instance_key=instance_key,
                ordering_token=[self._get_ordering_token()],
                communication_hint=options.implementation.value.lower(),
                timeout_seconds=options.timeout_seconds,
            )

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' rows at the position of this one."""
        received = from_words(self.exchange(to_words(rows), None), rows.dtype, self.size, rows.shape[1])
        return tf.reduce_sum(received, axis=0)

    def join(self) -> None:
        """Joins the group, while a function is traced in which the process's other replicas join it, too.

        Otherwise the first collective would do so. If another replica failed before it, TensorFlow would cancel the
        group permanently, and abort all collectives of the process when it is used again.
        """
        with tf.device(self._device):
            sum_of_group(
                tf.zeros([]),
                self._group_size,
                self._group_key,
                _KEY_OF_JOINING,
                hint=self._options.implementation.value,
                ordering_tokens=[self._token.handle],
            )

    def _next_instance_key(self) -> Any:
        signature, self._launching = self._launching, None
        if is_compiling():
            raise CannotCompileError
        reject_exchange_in_compiled_function()
        reject_loop_in_replica()
        if tf.executing_eagerly():
            return super()._next_instance_key()
        return self.instance_keys.next(signature)

    def _get_ordering_token(self) -> Any:
        return self._token.handle


def _signature(kind: str, tensor: tf.Tensor, shape_is_fixed: bool) -> str | None:
    shape_is_fixed = shape_is_fixed or _shapes_are_fixed.get()
    if not shape_is_fixed or not tensor.shape.is_fully_defined():
        return None
    return f"{kind} {tensor.dtype.name} {tensor.shape.as_list()}"


class AllReduce(CollectiveAllReduce):
    """TensorFlow's cross-device operations with tfdist's reduction in the replica context."""

    def __init__(
        self,
        stock: CollectiveAllReduce,
        reduction: Any,
        rank: int = 0,
        replicas_of_workers: Sequence[int] | None = None,
        boundary: Any = None,
    ) -> None:
        """Replaces `stock`, the operations that TensorFlow created for a strategy, and uses its group key.

        `reduction` is called once per local replica with the launchers `(over all replicas, between workers, within
        this worker, number of the replica)`. Its result is called as `(tensors, mean, options) -> tensors` whenever
        that replica reduces a flat list. By default the replicas of this process take part. For `boundary` see
        `WorkersLauncher`.
        """
        super().__init__(
            stock._devices, stock._group_size, stock._options, stock._collective_keys, stock._canonicalize_devices
        )
        self._gathers: dict[Any, Any] = {}
        counts = tuple(replicas_of_workers or (len(self._devices),))
        self._group_size = sum(counts)  # TensorFlow's is a multiple of this worker's number of devices
        self._counts, self._is_within_worker = counts, False
        self._reductions_within: list[Callable[..., Any]] = []
        group_key = self._collective_keys.get_group_key(self._devices)
        self._boundary = boundary
        if len(counts) == 1:
            self._local = self._launchers = [self._launcher(group_key, counts[0], device) for device in self._devices]
            self.reductions = [reduction(launcher, launcher, None, i) for i, launcher in enumerate(self._local)]
            return
        is_alone = counts[rank] == 1
        if boundary is None:  # with NCCL: groups of TensorFlow's collectives, whose keys are unique in the cluster
            key = group_key + _GROUPS_OF_LEVELS
            self._launchers = [self._launcher(group_key, self._group_size, device) for device in self._devices]
            between = self._launchers[0] if is_alone else self._launcher(key, len(counts), self._devices[0])
            group_key = key + 1 + rank
        else:
            between = self._workers_launcher()
        self._local = [] if is_alone else [self._launcher(group_key, counts[rank], device) for device in self._devices]
        local: list[ReplicaLauncher | None] = [*self._local] or [None] * len(self._devices)
        if boundary is not None and max(counts) == 1:
            self._launchers = [between]
        elif boundary is not None:
            arguments = (boundary, self._collective_keys)
            self._launchers = [
                DevicesOfWorkersLauncher(*arguments, device, self._options, local[index], counts, rank, index)
                for index, device in enumerate(self._devices)
            ]
        self.reductions = [
            reduction(launcher, None if index else between, local[index], rank)
            for index, launcher in enumerate(self._launchers)
        ]

    def join_groups(self) -> None:
        """Joins all groups of this process's replicas; see `ReplicaLauncher.join`."""
        launchers = [
            local_launcher
            for local_launcher in dict.fromkeys([*self._local, *self._launchers])
            if isinstance(local_launcher, ReplicaLauncher) and local_launcher.size > 1
        ]

        @tf.function(autograph=False)
        def join() -> None:
            for launcher in launchers:
                launcher.join()

        if launchers:
            join.get_concrete_function()()  # a call of `join` counts as retracing, of which TensorFlow warns

    def equalize_keys(self) -> None:
        """Makes the replicas of this process draw equal keys after a step that has failed; see `InstanceKeys`."""
        InstanceKeys.equalize([launcher.instance_keys for launcher in self._local])

    def within_worker(self) -> AbstractContextManager[None]:
        """Within this context, in which replicas are traced, they reduce over the replicas of their worker."""
        return setting_attributes(self, _is_within_worker=True)

    def prepare_within_worker(self, reduction: Callable[[ReplicaLauncher, int], Any]) -> None:
        """Prepares `within_worker`.

        `reduction` is called once per local replica, if there are several, with the launcher of their group and the
        number of the replica in it. Its result is called as those of `AllReduce`.
        """
        local = [reduction(launcher, index) for index, launcher in enumerate(self._local)]
        self._reductions_within = local or [lambda tensors, **_: list(tensors)]

    def background_launcher(self, number: int) -> WorkersLauncher | ReplicaLauncher:
        """Returns the launcher of a further group of the workers' first devices, which steps do not use.

        `number`, the same on all workers, is another one for each call, from 0.
        """
        if self._boundary is not None:
            in_background = self._boundary.new_background()
            launcher = self._workers_launcher(in_background)
            self._boundary.end_background_with(launcher, in_background)
            return launcher
        group_key = self._collective_keys.get_group_key(self._devices) + _GROUP_IN_BACKGROUND + number
        launcher = self._launcher(group_key, len(self._counts), self._devices[0])
        join = tf.function(launcher.join, autograph=False)
        join.get_concrete_function()()
        return launcher

    def _workers_launcher(self, in_background: int | None = None) -> WorkersLauncher:
        device = self._devices[0]
        return WorkersLauncher(self._boundary, self._collective_keys, device, self._options, in_background)

    def _launcher(self, group_key: int, size: int, device: str) -> ReplicaLauncher:
        return ReplicaLauncher(group_key, size, self._collective_keys, device, self._options)

    @property
    def host(self) -> str:
        """The CPU of this worker."""
        return self._launchers[0].host

    @property
    def launchers(self) -> list[ReplicaLauncher]:
        """Those over all replicas, one for each local replica."""
        return self._launchers

    def _batch_all_gather(self, per_replica_values: Any, axis: Any, options: Any) -> Any:
        if not tf.executing_eagerly():
            return super()._batch_all_gather(per_replica_values, axis, options)
        return [self._gather_eagerly(value, int(axis), options) for value in per_replica_values]

    def _gather_eagerly(self, value: Any, axis: int, options: Any) -> Any:
        """Gathers in one function for each kind of tensor; TensorFlow traces a new function in each call."""
        tensors = [tf.convert_to_tensor(tensor) for tensor in value._values]
        spec = tf.TensorSpec([None] * tensors[0].shape.rank, tensors[0].dtype)
        kind = (spec, axis, options.implementation, options.timeout_seconds)
        gather_stock = super()._batch_all_gather

        def gather(*local: tf.Tensor) -> list[tf.Tensor]:
            (gathered,) = gather_stock([regroup(local, always_wrap=True)], axis, options)
            return list(gathered._values) if len(local) > 1 else [gathered]

        if kind not in self._gathers:
            self._gathers[kind] = tf.function(gather, input_signature=[spec] * len(tensors), autograph=False)
        return regroup(self._gathers[kind](*tensors), wrap_class=Mirrored)

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        reductions = self._reductions_within if self._is_within_worker else self.reductions
        with tf.device(self._devices[replica_id]):
            reduced = reductions[replica_id](
                tf.nest.flatten(value), mean=reduce_op == tf.distribute.ReduceOp.MEAN, options=options
            )
        return tf.nest.pack_sequence_as(value, reduced)


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
