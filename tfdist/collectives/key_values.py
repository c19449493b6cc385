"""Values under keys, by which the workers of a cluster agree."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


class KeyValues:
    """What the workers publish, in the store of the cluster that this process has joined.

    A wait raises a `tf.errors.OpError` if a worker is lost.
    """

    def __init__(self) -> None:
        self._store: Any = None
        self._start_seconds = 300.0
        self.exchanged: dict[str, list[str]] = {}  # the results of `exchange`, by their names
        self._remembers = False
        self._members: Sequence[int] | None = None

    def use(self, store: Any, members: Sequence[int] | None = None) -> None:
        """Makes `store`, with the methods of `ClusterKeyValues`, what workers agree by from now on.

        `members` are the ranks of those that there are, by default all.
        """
        self._store, self._members = store, members

    def remember(self, exchanged: Mapping[str, list[str]]) -> None:
        """Keeps what workers exchange from now on for those that join later, who begin with what is `exchanged`."""
        self._remembers, self.exchanged = True, dict(exchanged)

    def limit_start(self, seconds: float) -> None:
        """Sets how long a worker waits for the others while they create the same strategy."""
        self._start_seconds = seconds

    def publish(self, key: str, value: str, *, only_for: int | None = None) -> None:
        """Publishes `value` to all workers, or to the one of a rank, under `key`, which must be new."""
        self._store.publish(key, value, only_for=only_for)

    def propose(self, key: str, value: str) -> str:
        """Publishes `value` unless a worker has published one under `key`; returns the value of all workers."""
        with _as_unavailable():
            return str(self._store.propose(key, value))

    def wait_for(self, key: str) -> str:
        """Waits until a worker has published `key` and returns its value."""
        with _as_unavailable():
            return str(self._store.wait_for(key))

    def is_published(self, key: str, within_seconds: float) -> bool:
        """Waits until a worker has published `key`, or the time is over; returns whether one has."""
        with _as_unavailable():
            return self._store.wait_for(key, min(max(within_seconds, 0.0), threading.TIMEOUT_MAX)) is not None

    def take(self, key: str) -> str:
        """Waits like `wait_for`, and removes what was published for this worker only."""
        with _as_unavailable():
            return str(self._store.take(key))

    def withdraw(self, key: str) -> None:
        """Removes what was published under `key`."""
        self._store.withdraw(key)

    def exchange(self, name: str, value: str, rank: int, num_workers: int) -> list[str]:
        """Returns the values of all workers, by rank, each of which calls this with its own.

        Each `name` is used once. For a worker that is lost, the value of the first one that is not counts.

        Raises:
            TimeoutError: A worker does not call this in the time that workers have to start.
        """
        if name in self.exchanged:
            return self.exchanged[name]
        self.publish(f"{name}/{rank}", value)
        values: list[str] = []
        for worker in range(num_workers):
            if self._members is not None and worker not in self._members:
                worker = self._members[0]
            if not self.is_published(f"{name}/{worker}", self._start_seconds):
                raise TimeoutError(
                    f"Worker {worker} does not create the strategy that this worker creates. Received: no answer for "
                    f"{name!r} in {self._start_seconds:g} s. Expected: the same strategies in the same order on all "
                    "workers. See what that worker does, or allow more time with `start_timeout_seconds`."
                )
            values.append(self.wait_for(f"{name}/{worker}"))
        if self._remembers:
            self.exchanged[name] = values
        return values


key_values = KeyValues()


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Raises the error of a lost worker as TensorFlow's store does."""
    try:
        yield
    except RuntimeError as error:
        raise tf.errors.UnavailableError(None, None, str(error)) from error
