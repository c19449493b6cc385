"""TensorFlow's cluster coordinator: chief exit and reconnection while a worker is lost, scheduled functions."""

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import dispatch_context, get_default_graph

_coordinators: "weakref.WeakSet[Coordinator]" = weakref.WeakSet()


class Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's coordinator, without blocking the chief's exit while a worker is lost."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        _coordinators.add(self)

    def create_per_worker_dataset(self, dataset_fn: Any) -> Any:
        """Creates a dataset on each worker; see TensorFlow's method.

        Args:
            dataset_fn: A function that returns a dataset, or the result of the strategy's
                `distribute_datasets_from_function`.
        """
        return super().create_per_worker_dataset(getattr(dataset_fn, "dataset_fn", dataset_fn))

    def __del__(self) -> None:
        # At interpreter exit its threads are frozen, perhaps with the lock that this would wait for.
        if not sys.is_finalizing():
            super().__del__()


def has_coordinators() -> bool:
    """Whether a coordinator of this process is connected to the cluster."""
    return bool(_coordinators)


@contextlib.contextmanager
def without_reconnecting() -> Iterator[bool]:
    """Prevents this process's coordinators from reconnecting to the cluster, as they do when a worker is lost.

    TensorFlow crashes if two coordinators connect at the same time.

    Yields:
        Whether it was possible; False if a coordinator is already reconnecting.
    """
    with contextlib.ExitStack() as held:
        is_free = True
        for coordinator in list(_coordinators):
            lock = coordinator._cluster.failure_handler._cluster_update_lock
            if lock.acquire(blocking=False):
                held.callback(lock.release)
            else:
                is_free = False
        yield is_free


def allow_run_on_chief(strategy: Any) -> None:
    """Allows functions that the chief calls directly to use `strategy.run` without a warning."""
    strategy.extended._allow_run_without_coordinator = True


def worker_index() -> tf.Tensor:
    """Returns the number of the worker that runs a scheduled function, an int32 scalar; -1 elsewhere."""

    def index() -> tf.Tensor:
        context = dispatch_context()
        return tf.constant(-1 if context is None else context.worker_index, tf.int32)

    return get_default_graph().capture_call_time_value(index, tf.TensorSpec([], tf.int32))


def is_done(remote_value: Any) -> bool:
    """Whether a scheduled function has ended and will not be run again.

    A worker may die between the end of the function and the copy of its output to the chief; then the function is run
    again. So the copy counts.
    """
    return remote_value._has_fetched_to_local or remote_value._error is not None
