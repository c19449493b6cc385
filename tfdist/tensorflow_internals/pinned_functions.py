"""Functions that TensorFlow's coordinator runs on one given worker, also again after that worker has returned."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private

_COORDINATOR = "tensorflow.python.distribute.coordinator"

_ResourceClosure = private(
    f"{_COORDINATOR}.cluster_coordinator:ResourceClosure",
    "a function that is run on one worker, and again after a loss",
)
_PerWorkerIterator = private(f"{_COORDINATOR}.values:PerWorkerDistributedIterator", "an iterator on each worker")
_Status = private(f"{_COORDINATOR}.remote_value:RemoteValueStatus", "whether the worker of a function is lost")
_iterator_spec = private(
    "tensorflow.python.distribute.input_lib:get_iterator_spec_from_dataset", "with what iterator a function is traced"
)
private(
    f"{_COORDINATOR}.cluster_coordinator:Worker._register_and_schedule_resource_closure",
    "schedules a function on one worker",
)


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
