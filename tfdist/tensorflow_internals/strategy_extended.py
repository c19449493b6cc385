"""The `StrategyExtended` implementations, with the changes that Keras 3 and accumulation need."""

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.collective_launcher import AllReduce
from tfdist.tensorflow_internals.runtime import cluster_is_running
from tfdist.tensorflow_internals.tensorflow_symbols import (
    CollectiveAllReduce,
    CollectiveAllReduceExtended,
    Mirrored,
    MirroredExtended,
    get_default_graph,
)

ReductionFactory = Callable[..., Any]


def _merge_call_is_needed(extended: Any) -> bool:
    """Whether replicas must reduce in a merge call: eagerly, when they run one after another, and between replicas.

    In a function every replica is traced and launches its collectives, so they may be in a condition (gradient
    accumulation) and start as soon as their inputs are ready (overlap with backpropagation). Outside `run` there are
    no replicas to launch them: `reduce` and `gather` take TensorFlow's path, also outside `scope()`, where
    TensorFlow's context is that of another strategy's replica.
    """
    in_function = get_default_graph().building_function
    # A function called by a replica that runs eagerly: the other replicas run after it, so its collectives would wait
    # indefinitely; a merge call raises an error there.
    replica_is_eager = getattr(threading.current_thread(), "in_eager", False)
    replica = tf.distribute.get_replica_context()
    is_between_replicas = replica is None or replica.strategy.extended is not extended
    return tf.executing_eagerly() or not in_function or replica_is_eager or is_between_replicas


class ReplicaMirroredExtended(MirroredExtended):
    """`MirroredExtended` that reduces in the replica context."""

    def __init__(
        self, strategy: Any, devices: Any, cross_device_ops: Any, options: Any, reduction: ReductionFactory
    ) -> None:
        self._reduction = reduction
        self._requested_options = options
        super().__init__(strategy, devices=devices, cross_device_ops=cross_device_ops)

    def _use_merge_call(self) -> bool:
        return _merge_call_is_needed(self)

    def _make_collective_ops_with_fallbacks(self) -> Any:
        stock = super()._make_collective_ops_with_fallbacks()
        if not isinstance(stock, CollectiveAllReduce):
            raise ValueError(
                "MirroredStrategy reduces with collectives, which need devices of one type. "
                f"Received: devices={list(self._devices)}. Expected: CPUs only or GPUs only. "
                "Leave one of the types out of `devices`."
            )
        if self._requested_options is not None:
            self._communication_options = stock._options = self._requested_options
        return AllReduce(stock, self._reduction)

    @property
    def replica_operations(self) -> AllReduce:
        """The cross-device operations that reduce over all replicas."""
        return self._collective_ops


class ReplicaMultiWorkerExtended(CollectiveAllReduceExtended):
    """`CollectiveAllReduceExtended` that reduces in the replica context and uses all logical devices of a worker."""

    _cross_device_ops: Any
    _host_cross_device_ops: Any

    def __init__(self, strategy: Any, cluster_resolver: Any, options: Any, reduction: ReductionFactory) -> None:
        self._reduction = reduction
        super().__init__(strategy, cluster_resolver=cluster_resolver, communication_options=options)
        self._cross_device_ops = AllReduce(self._cross_device_ops, reduction, self.rank)
        self._host_cross_device_ops = AllReduce(self._host_cross_device_ops, reduction, self.rank)

    def _use_merge_call(self) -> bool:
        return _merge_call_is_needed(self)

    def _initialize_multi_worker(self, cluster_resolver: Any) -> None:
        # A process has one server: the second strategy of a process uses that of the first.
        if cluster_is_running():
            self._local_or_standalone_client_mode = True
        super()._initialize_multi_worker(cluster_resolver)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        if kind == "CPU":
            physical = tf.config.list_physical_devices("CPU")[0]
            logical = tf.config.get_logical_device_configuration(physical) or [None]
            devices = tuple(f"{worker_device}/device:CPU:{index}" for index in range(len(logical)))
        return devices, kind

    # A single worker takes the path of MirroredStrategy, without collectives where there is one.

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if self._num_workers == 1:
            return MirroredExtended._reduce_to(self, reduce_op, value, destinations, options)
        reduce_one = super()._reduce_to
        return tf.nest.map_structure(lambda v: reduce_one(reduce_op, v, destinations, options), value)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: Any, options: Any) -> Any:
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
        """Number of workers."""
        return int(self._num_workers)

    @property
    def rank(self) -> int:
        """The rank of this worker; the chief has rank 0."""
        return int(self._id_in_cluster)


class _SharedResult(Mirrored):
    """Values that are equal on all replicas after a synchronization. (A variable is `Mirrored`, too.)"""


def equal_on_all_replicas(values: list[Any]) -> Any:
    """Wraps the local replicas' `values`, which are equal on all replicas."""
    return _SharedResult(values)


def is_equal_on_all_replicas(value: Any) -> bool:
    """Whether `value` was wrapped by `equal_on_all_replicas`."""
    return isinstance(value, _SharedResult)
