"""Functions that are at work on the workers."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.parameter_server import is_done

_POLL_SECONDS = 0.0005
_SLOW_POLL_SECONDS = 0.005
_PATIENCE_SECONDS = 0.1


class Work:
    """Schedules functions through TensorFlow's coordinator, and collects what they return, in any order.

    The coordinator gives what a dying worker was at to another one. An error of a function ends everything that is
    scheduled, and is raised once, by whatever is called next.
    """

    def __init__(
        self, coordinator: tf.distribute.coordinator.ClusterCoordinator, while_waiting: Callable[[], None]
    ) -> None:
        """Nothing is at work at first; `while_waiting()` is called again and again while that takes long."""
        self._coordinator, self._while_waiting = coordinator, while_waiting
        self._at_work: list[tuple[Any, Any, int]] = []  # with the number of each, the oldest first
        self._scheduled = 0

    def __len__(self) -> int:
        return len(self._at_work)

    @property
    def span(self) -> int:
        """How many have been scheduled since the oldest that is at work was, with that one; 0 if none is."""
        return self._scheduled - self._at_work[0][2] if self._at_work else 0

    def schedule(self, function: Callable[..., Any], args: tuple[Any, ...], note: Any = None) -> None:
        """Has a worker call `function(*args)`; `note` comes back with the result."""
        try:
            self._at_work.append((self._coordinator.schedule(function, args=args), note, self._scheduled))
            self._scheduled += 1
        except BaseException:
            self._at_work.clear()
            raise

    def finished(self) -> Iterator[tuple[Any, Any]]:
        """Yields what has ended meanwhile, as (note, result); it is at work no more."""
        self._raise_error()
        done = [item for item in self._at_work if is_done(item[0])]
        self._at_work = [item for item in self._at_work if not any(item is other for other in done)]
        for value, note, _ in done:
            yield note, value.get()

    def wait(self, until: Callable[[], bool], take: Callable[[Any, Any], None]) -> None:
        """Gives what ends to `take(note, result)` until `until()` is true."""
        began = time.monotonic()
        while True:
            for note, result in self.finished():
                take(note, result)
            if until():
                return
            patient = time.monotonic() - began > _PATIENCE_SECONDS
            if patient:
                self._while_waiting()
            time.sleep(_SLOW_POLL_SECONDS if patient else _POLL_SECONDS)

    def _raise_error(self) -> None:
        try:
            self._coordinator.done()
        except BaseException:
            self._at_work.clear()
            raise
