"""Checkpoints whose every value says which checkpoint and rank it belongs to, saved by threads that stand for ranks."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tfdist.checkpoint import Checkpoint, CheckpointStore, Shard

LIMIT_SECONDS = 30


def make_shard(sequence: int, rank: int | None) -> Shard:
    """What rank `rank` saves as number `sequence`, or what all share if it is None."""
    generator = np.random.default_rng([sequence, 0 if rank is None else rank + 1])
    tensors = {
        "dense/kernel": generator.normal(size=(7, 5)).astype(np.float32),
        "iterations": np.array(sequence, np.int64),
        "seed": generator.integers(0, 2**32, 2, np.uint32),
    }
    return Shard(tensors, {"sequence": sequence, "rank": rank, "history": {"loss": generator.normal(size=3).tolist()}})


def make_save(
    store: CheckpointStore, sequence: int, *, num_ranks: int = 1, attempt: str = "a", ranks: Sequence[int] | None = None
) -> Checkpoint:
    """Saves with all or some ranks at once, and returns what rank 0 got; raises the lowest rank's error."""
    saved: dict[int, Checkpoint | None] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        shared = make_shard(sequence, None) if rank == 0 else None
        metadata = {"step": 100 * sequence, "epoch": sequence}
        own = make_shard(sequence, rank)
        try:
            saved[rank] = store.save(
                sequence,
                attempt,
                rank=rank,
                num_ranks=num_ranks,
                rank_shard=own,
                shared_shard=shared,
                metadata=metadata,
            )
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks or range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for rank in sorted(errors):
        raise errors[rank]
    assert all(saved[rank] is None for rank in saved if rank)
    return saved.get(0)  # type: ignore[return-value]


def check_same(shard: Shard, expected: Shard) -> None:
    """Bit by bit, and of the same dtypes and shapes."""
    assert shard.metadata == expected.metadata
    assert shard.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        found = shard.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert found.tobytes() == tensor.tobytes(), name


def check_complete(checkpoint: Checkpoint | None, sequence: int, num_ranks: int = 1) -> None:
    """Every value is that of `sequence`."""
    assert checkpoint is not None
    assert (checkpoint.sequence, checkpoint.num_ranks) == (sequence, num_ranks)
    assert checkpoint.metadata == {"step": 100 * sequence, "epoch": sequence}
    check_same(checkpoint.read_shared(), make_shard(sequence, None))
    for rank in range(num_ranks):
        check_same(checkpoint.read_rank(rank), make_shard(sequence, rank))


@pytest.fixture
def shard() -> Callable[..., Shard]:
    return make_shard


@pytest.fixture
def save() -> Callable[..., Checkpoint]:
    return make_save


@pytest.fixture
def assert_same() -> Callable[[Shard, Shard], None]:
    return check_same


@pytest.fixture
def assert_complete() -> Callable[..., None]:
    return check_complete
