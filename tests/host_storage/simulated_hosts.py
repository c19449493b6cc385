"""Hosts of one training, each a directory, with workers that are threads: real files and sockets, no TensorFlow."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.checkpoint import Checkpoint, Shard
from tfdist.host_storage.host_store import HostStore
from tfdist.host_storage.meeting_of_hosts import Place

LIMIT_SECONDS = 60.0
Values = dict[tuple[int, int, str], Any]


class Messages:
    """What a worker tells the others, in memory."""

    def __init__(self, rank: int, num_workers: int, values: Values, changed: threading.Condition) -> None:
        self.rank, self.num_workers, self._values, self._changed = rank, num_workers, values, changed

    def send(self, to: int, name: str, value: Any) -> None:
        with self._changed:
            assert (self.rank, to, name) not in self._values, f"{name} was told twice"
            self._values[self.rank, to, name] = value
            self._changed.notify_all()

    def receive(self, sender: int, name: str, timeout_seconds: float) -> Any:
        key = (sender, self.rank, name)
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_seconds)
            return self._values.pop(key, None)


def in_threads(function: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
    """Calls a function with each rank, at once; returns the results, or raises the error of the lowest rank."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def call(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    for rank in sorted(errors):
        raise errors[rank]
    return [results[rank] for rank in ranks]


class Training:
    """One attempt: a store for each worker, which have met.

    Args:
        directories: The directory of each worker's host.
        attempt: The name of the attempt.
        make_store: Makes the store of a directory.
        **options: Of the stores.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        attempt: str = "a",
        make_store: Callable[..., HostStore] = HostStore,
        **options: Any,
    ) -> None:
        self.attempt, self.size = attempt, len(directories)
        options = {"peer_timeout_seconds": LIMIT_SECONDS, **options}
        self.stores = [make_store(directory, **options) for directory in directories]
        values: Values = {}
        changed = threading.Condition()
        self.messages = [Messages(rank, self.size, values, changed) for rank in range(self.size)]

        def meet(rank: int) -> Callable[[], None]:
            return self.stores[rank].meet(self.messages[rank], Place(directories[rank].name, "127.0.0.1", 0), "")

        self._ends = in_threads(meet, range(self.size))
        self.skipped: list[str] = []

    def save(self, sequence: int, *, ranks: Sequence[int] | None = None, differs: Sequence[int] = ()) -> Any:
        """Saves on all, or some, workers at once; returns what the chief gets. Leaders that differ save other bytes."""

        def run(rank: int) -> Any:
            store = self.stores[rank]
            shared = None
            if store.leads or rank == 0:
                shared = make_shard(sequence, None, self.attempt if rank not in differs else f"other {rank}")
            return store.save(
                sequence,
                self.attempt,
                rank=rank,
                num_ranks=self.size,
                rank_shard=make_shard(sequence, rank, self.attempt),
                shared_shard=shared,
                metadata={"step": 10 * sequence},
            )

        return in_threads(run, range(self.size) if ranks is None else ranks)[0]

    def restore(self) -> list[Checkpoint | None]:
        """Returns the checkpoint that each worker opens; None for all if there is none."""
        newest, self.skipped = self.stores[0].newest()
        self.stores[0].remove_unfinished()
        if newest is None:
            return [None] * self.size

        def open_and_read(rank: int) -> Checkpoint:
            checkpoint = self.stores[rank].open(newest.sequence)
            checkpoint.read_shared()
            if rank < newest.num_ranks:
                checkpoint.read_rank(rank)
            self.stores[rank].wait_until_all_have_read()
            return checkpoint

        return list(in_threads(open_and_read, range(self.size)))

    def end(self) -> None:
        """Ends the meeting, as the end of a `fit` or of the processes."""
        for end in self._ends:
            end()


def make_shard(sequence: int, rank: int | None, attempt: str) -> Shard:
    """What rank `rank` saves, or what all share if it is None."""
    seed = [sequence, 0 if rank is None else rank + 1, *attempt.encode()]
    tensors = {"values": np.random.default_rng(seed).normal(size=300), "step": np.array(sequence)}
    return Shard(tensors, {"sequence": sequence, "rank": rank, "attempt": attempt})


def assert_is(checkpoint: Checkpoint | None, sequence: int, attempt: str, num_ranks: int) -> None:
    """Every file is what was saved."""
    assert checkpoint is not None and (checkpoint.sequence, checkpoint.num_ranks) == (sequence, num_ranks)
    assert checkpoint.metadata == {"step": 10 * sequence}
    shards = [(None, checkpoint.read_shared()), *((rank, checkpoint.read_rank(rank)) for rank in range(num_ranks))]
    for rank, shard in shards:
        expected = make_shard(sequence, rank, attempt)
        assert shard.metadata == expected.metadata
        assert all(shard.tensors[name].tobytes() == value.tobytes() for name, value in expected.tensors.items())
