"""TensorFlow's cluster coordinator: chief exit and reconnection while a worker is lost, scheduled functions."""

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.tensorflow_symbols import dispatch_context

_COORDINATOR = "tensorflow.python.distribute.coordinator"

CoordinatorQueue = private(
    f"{_COORDINATOR}.cluster_coordinator:_CoordinatedClosureQueue",
    "gives scheduled functions to the threads of workers",
)
_ResourceClosure = private(
    f"{_COORDINATOR}.cluster_coordinator:ResourceClosure",
    "a function that is run on one worker, and again after a loss",
)
_PerWorkerIterator = private(f"{_COORDINATOR}.values:PerWorkerDistributedIterator", "an iterator on each worker")
_Status = private(f"{_COORDINATOR}.remote_value:RemoteValueStatus", "whether the worker of a function is lost")
_iterator_spec = private(
    "tensorflow.python.distribute.input_lib:get_iterator_spec_from_dataset", "with what iterator a function is traced"
)

# After this time another worker takes the function: the preferred one is lost, or still busy.
_SECONDS_FOR_PREFERRED = 0.05

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

    return tf.compat.v1.get_default_graph().capture_call_time_value(index, tf.TensorSpec([], tf.int32))


def is_done(remote_value: Any) -> bool:
    """Whether a scheduled function has ended and will not be run again.

    A worker may die between the end of the function and the copy of its output to the chief; then the function is run
    again. So the copy counts.
    """
    return remote_value._has_fetched_to_local or remote_value._error is not None


class _PreferringQueue(CoordinatorQueue):  # type: ignore[misc, valid-type]
    """TensorFlow's queue, in which functions may have a preferred worker."""

    preferred: int | None = None  # of the functions that are added now

    def put(self, closure: Any, tag: int | None = None) -> None:
        closure.preferred, closure.queued_at = self.preferred, time.monotonic()
        super().put(closure, tag)
        if tag is None:
            with self._queue_lock:  # TensorFlow wakes one worker, which may be another one
                self._closures_queued_condition.notify_all()

    def put_back(self, closure: Any) -> None:
        closure.preferred = None
        super().put_back(closure)

    def get(self, timeout: float | None = None, tag: int | None = None) -> Any:
        with self._queue_lock:
            while self._should_process_closures:
                if tag is not None and not self._tagged_queue[tag].empty():
                    return self._tagged_queue[tag].get(block=False)
                closure = self._take(tag)
                if closure is not None:
                    self._queue_free_slot_condition.notify()
                    self.inflight_closure_count += 1
                    return closure
                is_waited_for = not self._queue.empty()
                limit = _SECONDS_FOR_PREFERRED if is_waited_for else timeout
                if not self._closures_queued_condition.wait(timeout=limit) and not is_waited_for:
                    return None
            return None

    def _take(self, worker: int | None) -> Any:
        """Removes and returns the first function that `worker` may run, or None."""
        late = time.monotonic() - _SECONDS_FOR_PREFERRED
        waiting = self._queue.queue
        for position, closure in enumerate(waiting):
            preferred = getattr(closure, "preferred", None)
            if preferred in (None, worker) or closure.queued_at < late:
                del waiting[position]
                return closure
        return None


@contextlib.contextmanager
def preferring(coordinator: Any, worker: int | None) -> Iterator[None]:
    """Within this context the functions that are scheduled are for one worker; `None`: for the first one that is free.

    It is a preference: another worker takes a function that has waited for 50 ms.
    """
    if worker is None:
        yield
        return
    queue = coordinator._cluster.closure_queue
    queue.__class__ = _PreferringQueue
    queue.preferred = worker
    try:
        yield
    finally:
        queue.preferred = None


class _PinnedClosure(_ResourceClosure):  # type: ignore[misc, valid-type]
    def execute_on(self, worker: Any) -> None:
        super().execute_on(worker)
        # Copied here, where the loss of the worker is handled.
        self.maybe_call_with_output_remote_value(lambda value: value.get())


class PinnedCall:
    """A function that was scheduled on one worker."""

    def __init__(self, remote_value: Any) -> None:
        self._value = remote_value

    @property
    def is_done(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self._value._has_fetched_to_local or self._error is not None

    @property
    def is_lost(self) -> bool:
        """Whether the worker was lost before it has ended. It runs again when the worker has returned."""
        return not self.is_done and self._value._status is _Status.ABORTED

    def result(self) -> Any:
        """Returns what the function has returned, once it is done, or raises its error."""
        if self._value._has_fetched_to_local:
            return self._value._fetched_tensors
        raise self._error or RuntimeError("the function has not ended")

    @property
    def _error(self) -> BaseException | None:
        return self._value._error if self._value._status is _Status.READY else None


def call_on_worker(coordinator: Any, worker: int, function: Any, args: tuple[Any, ...]) -> PinnedCall:
    """Schedules `function(*args)`, a `tf.function` that is traced here, on a worker.

    Of arguments that are values of all workers the function gets its own.
    """
    cluster = coordinator._cluster
    target = cluster.workers[worker]
    closure = _PinnedClosure(function, cluster.resource_cancellation_mgr, args=args)
    with target._resource_tracking_lock:  # TensorFlow keeps a reference to each closure forever
        references = target._resource_remote_value_refs
        references[:] = [reference for reference in references if reference() is not None]
    return PinnedCall(target._register_and_schedule_resource_closure(closure))


def create_iterators(coordinator: Any, datasets: Sequence[tuple[Any, Callable[[], int]] | None], strategy: Any) -> Any:
    """Creates an iterator on each worker, from a separate dataset; returns an argument of scheduled functions.

    For each worker there is a concrete function that takes a number of batches and returns the dataset without these,
    and a function that returns this number whenever the iterator is created, also after a loss of the worker; `None`
    for a worker without an iterator. The first worker has one. A scheduled function gets the iterator of its worker.
    """
    values: list[Any] = []
    for worker, pair in zip(coordinator._cluster.workers, datasets, strict=True):
        if pair is None:
            values.append(values[0])  # which nobody asks for
            continue

        def create(function: Any = pair[0], position: Callable[[], int] = pair[1]) -> Any:
            return iter(function(tf.constant(position(), tf.int64)))

        value = worker.create_resource(create)
        value._type_spec = _iterator_spec(strategy, pair[0].structured_outputs)
        values.append(value)
    return _PerWorkerIterator(tuple(values))
