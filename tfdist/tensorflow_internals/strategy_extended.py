"""The `StrategyExtended` implementations, with the changes that Keras 3 and accumulation need."""

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.collective_launcher import AllReduce
from tfdist.tensorflow_internals.input_pipeline import DistributedDataset, distribute_shown_batches
from tfdist.tensorflow_internals.operation_order import OrdersReplicas
from tfdist.tensorflow_internals.tensorflow_symbols import (
    CollectiveAllReduce,
    CollectiveAllReduceExtended,
    Mirrored,
    MirroredExtended,
    regroup,
    simple_broadcast,
)
from tfdist.utils.temporary_values import setting

ReductionFactory = Callable[..., Any]

_GROUPS_OF_GIVEN_DEVICES = 1 << 10  # between those of levels and those in the background
_NCCL = tf.distribute.experimental.CommunicationImplementation.NCCL


_without_merge_calls: contextvars.ContextVar[bool] = contextvars.ContextVar("tfdist_without_merge", default=False)


def without_merge_calls() -> AbstractContextManager[None]:
    """Within this context an eager replica updates its own copies of variables; the others do something else."""
    return setting(_without_merge_calls, True)


def _merge_call_is_needed(extended: Any) -> bool:
    """Whether replicas must reduce in a merge call: eagerly, when they run one after another, and between replicas.

    In a function every replica is traced and launches its collectives, so they may be in a condition (gradient
    accumulation) and start as soon as their inputs are ready (overlap with backpropagation). Outside `run` there are
    no replicas to launch them: `reduce` and `gather` take TensorFlow's path, also outside `scope()`, where
    TensorFlow's context is that of another strategy's replica.
    """
    if _without_merge_calls.get():
        return False
    in_function = tf.compat.v1.get_default_graph().building_function
    # A function called by a replica that runs eagerly: the other replicas run after it, so its collectives would wait
    # indefinitely; a merge call raises an error there.
    replica_is_eager = getattr(threading.current_thread(), "in_eager", False)
    replica = tf.distribute.get_replica_context()
    is_between_replicas = replica is None or replica.strategy.extended is not extended
    return tf.executing_eagerly() or not in_function or replica_is_eager or is_between_replicas


class ReplicaMirroredExtended(OrdersReplicas, MirroredExtended):
    """`MirroredExtended` that reduces in the replica context."""

    def __init__(
        self, strategy: Any, devices: Any, cross_device_ops: Any, options: Any, reduction: ReductionFactory
    ) -> None:
        self._reduction = reduction
        self._requested_options = options
        super().__init__(strategy, devices=devices, cross_device_ops=cross_device_ops)
        self.replica_operations.join_groups()

    def _use_merge_call(self) -> bool:
        return _merge_call_is_needed(self)

    def _make_collective_ops_with_fallbacks(self) -> Any:
        stock = super()._make_collective_ops_with_fallbacks()
        if not isinstance(stock, CollectiveAllReduce):
            raise ValueError(
                "MirroredStrategy reduces with collectives, which need devices of one type. "
                f"Received: devices={list(self.worker_devices)}. Expected: CPUs only or GPUs only. "
                "Leave one of the types out of `devices`."
            )
        if self._requested_options is not None:
            self._communication_options = stock._options = self._requested_options
        return AllReduce(stock, self._reduction)

    @property
    def replica_operations(self) -> AllReduce:
        """The cross-device operations that reduce over all replicas."""
        return self._collective_ops


class ReplicaMultiWorkerExtended(OrdersReplicas, CollectiveAllReduceExtended):
    """`CollectiveAllReduceExtended` that reduces in the replica context and uses all logical devices of a worker.

    Args:
        reduction: Creates what reduces over the replicas.
        devices_of_workers: Takes the type and number of this worker's devices, its rank, the number of workers, a name,
            and whether workers `use_nccl`; returns the numbers of devices of all workers.
        boundary: To the exchange with the other workers; `None` with NCCL, or without other workers.
    """

    _cross_device_ops: Any
    _host_cross_device_ops: Any

    def __init__(
        self,
        strategy: Any,
        cluster_resolver: Any,
        options: Any,
        reduction: ReductionFactory,
        devices_of_workers: Callable[..., tuple[int, ...]],
        boundary: Any = None,
    ) -> None:
        self._reduction, self._boundary = reduction, boundary
        self._devices_of_workers = devices_of_workers
        self._replicas_of_workers: tuple[int, ...] = ()
        super().__init__(strategy, cluster_resolver=cluster_resolver, communication_options=options)
        self._reduce_by_replicas()

    def _reduce_by_replicas(self) -> None:
        """Replaces the cross-device operations that TensorFlow has created."""
        arguments = (self._reduction, self.rank)
        self._cross_device_ops = AllReduce(self._cross_device_ops, *arguments, self.replicas_of_workers, self._boundary)
        hosts = (1,) * self.num_workers
        self._host_cross_device_ops = AllReduce(self._host_cross_device_ops, *arguments, hosts, self._boundary)
        self._cross_device_ops.join_groups()

    def _initialize_strategy(self, cluster_resolver: Any, devices: Any) -> None:
        use_nccl = self._communication_options.implementation == _NCCL
        if use_nccl:
            super()._initialize_strategy(cluster_resolver, devices)
        else:  # TensorFlow in this process is that of one process; `boundary` connects it with the other workers
            self._initialize_local(cluster_resolver, devices)
            self._cluster_spec = tf.train.ClusterSpec(cluster_resolver.cluster_spec())
            self._task_type, self._task_id = cluster_resolver.task_type or None, cluster_resolver.task_id
            if self._boundary is not None:
                self._num_workers, self._id_in_cluster = self._boundary.size, self._boundary.rank
                self._is_chief = self._id_in_cluster == 0
        self._replicas_of_workers = (self._num_devices_per_worker,)
        if self._num_workers > 1:
            self._replicas_of_workers = self._devices_of_workers(
                self._local_device_type,
                self._num_devices_per_worker,
                self._id_in_cluster,
                self._num_workers,
                f"tfdist/devices/{self._collective_key_base}",
                use_nccl=use_nccl,
            )
        if use_nccl and self._workers_are_unequal:
            raise ValueError(
                "With NCCL all workers need as many GPUs. Received: by rank, "
                f"{list(self._replicas_of_workers)} devices. Expected: equal numbers. Hide GPUs by "
                "CUDA_VISIBLE_DEVICES, or leave NCCL out of `communication_options`."
            )

    def _use_merge_call(self) -> bool:
        return _merge_call_is_needed(self)

    def _initialize_local(self, cluster_resolver: Any, devices: Any = None) -> None:
        if devices:  # after the constructor, by `_from_local_devices`: of other groups than the constructor's
            self._collective_key_base += _GROUPS_OF_GIVEN_DEVICES
        super()._initialize_local(cluster_resolver, devices)
        if devices:
            self._replicas_of_workers = (len(devices),)
            self._reduce_by_replicas()

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        if kind == "CPU":
            physical = tf.config.list_physical_devices("CPU")[0]
            logical = tf.config.get_logical_device_configuration(physical) or [None]
            devices = tuple(f"{worker_device}/device:CPU:{index}" for index in range(len(logical)))
        return devices, kind

    def _get_variable_creator_initial_value(self, replica_id: Any, device: Any, primary_var: Any, **kwargs: Any) -> Any:
        """Returns the function that creates the initial value of a replica's copy, which is that of the chief."""
        if replica_id != 0 or self._boundary is None:
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        initial_value, dtype = kwargs["initial_value"], kwargs.get("dtype")

        def value_of_chief() -> tf.Tensor:
            with tf.device(device):
                value = initial_value() if callable(initial_value) else initial_value
                value = tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype)
                return tf.identity(
                    self._boundary.broadcast(value, limit_seconds=self._communication_options.timeout_seconds)
                )

        return value_of_chief

    @property
    def boundary(self) -> Any:
        """To the exchange with the other workers; `None` with NCCL, or without other workers."""
        return self._boundary

    @property
    def replicas_of_workers(self) -> tuple[int, ...]:
        """The number of devices of each worker, by rank."""
        return self._replicas_of_workers

    @property
    def _workers_are_unequal(self) -> bool:
        return len(set(self._replicas_of_workers)) > 1

    @property
    def _first_replica(self) -> int:
        return sum(self._replicas_of_workers[: self.rank])

    # TensorFlow computes these from the number of this worker's devices.

    @property
    def _num_replicas_in_sync(self) -> int:
        # Those that begin: the size of batches, which programs compute from it, stays when more workers join.
        return sum(self._replicas_of_workers[: None if self._boundary is None else self._boundary.beginning])

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> Any:
        return self._first_replica + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group - self._first_replica

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        contexts = [
            tf.distribute.experimental.ValueContext(self._first_replica + index, self._num_replicas_in_sync)
            for index in range(len(self.worker_devices))
        ]
        return regroup([value_fn(context) for context in contexts], always_wrap=True)

    def distribute_worker_batches(self, dataset: Any, batches: Any, shards_files: bool, options: Any) -> Any:
        """Returns the distributed dataset of `batches`, which one worker's replicas draw in turn.

        `dataset` is that of global batches. With `shards_files` TensorFlow shards `batches` over the workers.
        """
        workers = self._input_workers_with_options(options)
        alone = tf.distribute.InputContext(1, 0, self._num_replicas_in_sync)
        context = self._make_input_context() if shards_files else alone
        distributed = DistributedDataset(
            workers, self._container_strategy(), batches, input_context=context, options=options
        )
        distributed._original_dataset = dataset
        distributed._cardinality = int(dataset.cardinality())
        return distributed

    def distribute_shown_batches(self, dataset: Any, shown: Any, options: Any) -> Any:
        """Returns the distributed dataset whose batches are drawn from `shown`."""
        workers = self._input_workers_with_options(options)
        context, strategy = self._make_input_context(), self._container_strategy()
        return distribute_shown_batches(dataset, shown, strategy, context, workers, self._num_replicas_in_sync, options)

    # A single worker takes the path of MirroredStrategy, without collectives where there is one.

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if self._num_workers == 1:
            return MirroredExtended._reduce_to(self, reduce_op, value, destinations, options)
        reduce_one = self._reduce_by_worker if self._workers_are_unequal else super()._reduce_to
        return tf.nest.map_structure(lambda v: reduce_one(reduce_op, v, destinations, options), value)

    def _reduce_by_worker(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        """Reduces the values of this worker's replicas, or one of the worker, which then counts once."""
        if isinstance(value, Mirrored):
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                return value
            raise ValueError(
                "A variable or another value that is equal on all replicas cannot be summed. Received: "
                f"reduce_op={reduce_op} and {value}. Expected: values of replicas, or the mean."
            )
        workers, options = self._host_cross_device_ops, self._communication_options.merge(options)
        total = _sum_over_workers(value, workers, options)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            count = _sum_over_workers(tf.constant(len(_values(value)), tf.int32), workers, options)
            total = _divided(total, count)
        return simple_broadcast(total, destinations)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: Any, options: Any) -> Any:
        if self._workers_are_unequal:
            workers, values = self._host_cross_device_ops, _values(value)
            with tf.device(workers.host):
                worker_values = tf.concat(values, axis) if len(values) > 1 else tf.identity(values[0])
            return simple_broadcast(_only(workers._gather(worker_values, workers.host, axis, options)), destinations)
        base = MirroredExtended if self._num_workers == 1 else CollectiveAllReduceExtended
        return base._gather_to_implementation(self, value, destinations, axis, options)

    def _get_cross_device_ops(self, value: Any) -> Any:
        base = MirroredExtended if self._num_workers == 1 else CollectiveAllReduceExtended
        return base._get_cross_device_ops(self, value)

    @property
    def replica_operations(self) -> AllReduce:
        """The cross-device operations that reduce over all replicas."""
        return self._cross_device_ops

    @property
    def num_workers(self) -> int:
        return int(self._num_workers)

    @property
    def rank(self) -> int:
        """The rank of this worker; the chief has rank 0."""
        return int(self._id_in_cluster)


class EqualOnAllReplicas(Mirrored):
    """The local replicas' values, equal on all replicas after a synchronization. (A variable is `Mirrored`, too.)"""


def _sum_over_workers(value: Any, workers: Any, options: Any) -> Any:
    """`workers` is the `AllReduce` of one group of all workers, on their hosts."""
    total = value
    if isinstance(value, tf.distribute.DistributedValues):
        to_host = tf.distribute.ReductionToOneDevice()
        total = _only(to_host.reduce(tf.distribute.ReduceOp.SUM, value, workers.host))
    return _only(workers.reduce(tf.distribute.ReduceOp.SUM, total, workers.host, options))


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value._values) if isinstance(value, tf.distribute.DistributedValues) else (value,)


def _only(value: Any) -> Any:
    """Returns the value on the single device of a reduction's result."""
    return _values(value)[0]


def _divided(total: Any, count: tf.Tensor) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(total.values, count), total.indices, total.dense_shape)
    return total / tf.cast(count, total.dtype)
