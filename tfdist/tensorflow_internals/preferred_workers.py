"""Functions that a coordinator gives to the worker that the caller prefers, if that one takes them soon."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from tfdist.private_symbols import private

_COORDINATOR = "tensorflow.python.distribute.coordinator.cluster_coordinator"
_Queue = private(f"{_COORDINATOR}:_CoordinatedClosureQueue", "gives scheduled functions to the threads of workers")
private(f"{_COORDINATOR}:_CoordinatedClosureQueue.get", "returns the next function of a worker")
private(f"{_COORDINATOR}:_CoordinatedClosureQueue.put", "adds a function")
private(f"{_COORDINATOR}:_CoordinatedClosureQueue.put_back", "adds a function again whose worker was lost")

# After this time another worker takes the function: the preferred one is lost, or still busy.
_SECONDS_FOR_PREFERRED = 0.05


class _PreferringQueue(_Queue):  # type: ignore[misc, valid-type]
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
    """Within this context the functions that are scheduled are for one worker.

    It is a preference: another worker takes a function that has waited for 50 ms.

    Args:
        coordinator: TensorFlow's `ClusterCoordinator`.
        worker: The number of the worker; `None` for the first one that is free.
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
