"""Replicas as threads with plain NumPy collectives, and equal ones in one: what reductions are tested against."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compression import Group


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size


class ThreadGroup(Group):
    """One thread's view of the replicas; it keeps what it has sent, and what of it a network would have carried."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self.sent: list[np.ndarray] = []
        self.wire_bytes = 0.0

    @property
    def size(self) -> int:
        return len(self._meeting.values)

    def _exchange(self, tensor: Any, copies: float) -> list[np.ndarray]:
        value = np.asarray(tensor)
        self.sent.append(value)
        self.wire_bytes += copies * value.nbytes
        self._meeting.values[self._rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values

    def sum(self, tensor: Any) -> Any:
        values = self._exchange(tensor, 2 * (self.size - 1) / self.size)
        return tf.constant(np.sum(values, axis=0, dtype=values[0].dtype))

    def gather(self, tensor: Any) -> Any:
        values = self._exchange(tensor, self.size - 1)
        assert len({value.shape for value in values}) == 1, "gather needs one shape on all replicas"
        return tf.constant(np.concatenate(values))

    def exchange(self, slices: Any) -> tuple[Any, Any]:
        values = self._exchange(slices, (self.size - 1) / self.size)
        assert {value.shape[0] for value in values} == {self.size}, "one slice a replica"
        return tf.constant(np.stack([value[self._rank] for value in values])), tf.constant(self._rank)


class EqualReplicas(Group):
    """The first of `size` replicas that all do the same: it can be traced, and compiled by XLA."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def sum(self, tensor: Any) -> Any:
        return tensor * self._size

    def gather(self, tensor: Any) -> Any:
        return tf.concat([tensor] * self._size, axis=0)

    def exchange(self, slices: Any) -> tuple[Any, Any]:
        return tf.stack([slices[0]] * self._size), tf.constant(0)


class ThreadLauncher:
    """A `ReplicaLauncher` of threads: what a `CollectiveGroup` and `ReplicaHierarchy` need of one."""

    device = host = "CPU:0"
    reduces_and_scatters = sends_short_sums_at_once = may_lose_replicas = False

    def __init__(self, group: ThreadGroup) -> None:
        self.group = group
        self.size = group.size

    def sum(self, tensor: Any, options: Any, *, shape_is_fixed: bool) -> Any:
        return self.group.sum(tensor)

    def gather(self, tensor: Any, options: Any, *, shape_is_fixed: bool) -> Any:
        return self.group.gather(tensor)

    def exchange(self, tensor: Any, options: Any) -> Any:
        return self.group.exchange(tensor)[0]


def thread_groups(size: int) -> list[ThreadGroup]:
    """The groups of `size` threads."""
    meeting = _Meeting(size)
    return [ThreadGroup(meeting, rank) for rank in range(size)]


def on_replicas(size: int, function: Callable[[ThreadGroup, int], Any]) -> tuple[list[Any], list[ThreadGroup]]:
    """Runs `function(group, rank)` on `size` threads; returns their results and groups."""
    groups = thread_groups(size)
    meeting = groups[0]._meeting
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
