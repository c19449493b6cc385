"""Replicas as threads with plain NumPy collectives: what reductions are tested against."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Group


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size


class ThreadGroup(Group):
    """One thread's view of the replicas; it keeps what it has sent."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self.sent: list[np.ndarray] = []

    @property
    def size(self) -> int:
        return len(self._meeting.values)

    def _exchange(self, tensor: Any) -> list[np.ndarray]:
        value = np.asarray(tensor)
        self.sent.append(value)
        self._meeting.values[self._rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values

    def sum(self, tensor: Any) -> Any:
        return tf.constant(np.sum(self._exchange(tensor), axis=0))

    def gather(self, tensor: Any) -> Any:
        values = self._exchange(tensor)
        assert len({value.shape for value in values}) == 1, "gather needs one shape on all replicas"
        return tf.constant(np.concatenate(values))


def on_replicas(size: int, function: Callable[[ThreadGroup, int], Any]) -> tuple[list[Any], list[ThreadGroup]]:
    """Runs `function(group, rank)` on `size` threads; returns their results and groups."""
    meeting = _Meeting(size)
    groups = [ThreadGroup(meeting, rank) for rank in range(size)]
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(groups[rank], rank)
        except BaseException as error:
            results[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results, groups
