"""Schedules functions on the workers and collects their results."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.cluster_coordinator import is_done, preferring

_POLL_SECONDS = 0.0005
_SLOW_POLL_SECONDS = 0.005
_SLOW_POLL_AFTER_SECONDS = 0.1


class Scheduler:
    """Schedules functions by TensorFlow's coordinator; their results arrive in any order.

    If a worker dies, the coordinator gives its function to another one. An error of a function cancels everything that
    is scheduled and is raised once, by the next call.
    """

    def __init__(
        self, coordinator: tf.distribute.coordinator.ClusterCoordinator, while_waiting: Callable[[], None]
    ) -> None:
        """Creates a scheduler without work; `while_waiting` is called repeatedly during a long wait."""
        self._coordinator, self._while_waiting = coordinator, while_waiting
        self._running: list[tuple[Any, Any, int]] = []  # (remote value, tag, serial number), the oldest first
        self._scheduled = 0

    def __len__(self) -> int:
        """The number of functions whose results have not been collected."""
        return len(self._running)

    @property
    def window(self) -> int:
        """How many functions were scheduled since the oldest running one, including it; 0 if none runs."""
        return self._scheduled - self._running[0][2] if self._running else 0

    def schedule(
        self, function: Callable[..., Any], args: tuple[Any, ...], tag: Any = None, worker: int | None = None
    ) -> None:
        """Has a worker call `function(*args)`, a `tf.function`; `tag` is returned with the result.

        If `worker` is given and lost, another one calls it.
        """
        try:
            with preferring(self._coordinator, worker):
                value = self._coordinator.schedule(function, args=args)
            self._running.append((value, tag, self._scheduled))
            self._scheduled += 1
        except BaseException:
            self._running.clear()
            raise

    def finished(self) -> Iterator[tuple[Any, Any]]:
        """Yields the functions that have ended, as (tag, result), and removes them."""
        try:
            self._coordinator.done()
        except BaseException:
            self._running.clear()
            raise
        done = [item for item in self._running if is_done(item[0])]
        self._running = [item for item in self._running if not any(item is ended for ended in done)]
        for value, tag, _ in done:
            yield tag, value.get()

    def wait(self, until: Callable[[], bool], collect: Callable[[Any, Any], None]) -> None:
        """Calls `collect(tag, result)` for each function that ends, until `until()` is true."""
        began = time.monotonic()
        while True:
            for tag, result in self.finished():
                collect(tag, result)
            if until():
                return
            pause(time.monotonic() - began, self._while_waiting)


def pause(waited_seconds: float, while_waiting: Callable[[], None]) -> None:
    """Sleeps until the chief should look again at what runs; before that calls `while_waiting` in a long wait."""
    is_long = waited_seconds > _SLOW_POLL_AFTER_SECONDS
    if is_long:
        while_waiting()
    time.sleep(_SLOW_POLL_SECONDS if is_long else _POLL_SECONDS)
