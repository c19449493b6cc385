"""What each replica has for itself: named by the replica, put together from all workers, shared out to others."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

# How a value of N replicas becomes one of M: the sum over all replicas stays what it was ("sum"); so it does, but all
# of it lies with replica 0 ("total"); every replica takes the common value, else the mean ("mean"), or replica 0's
# ("first").
Rule = Literal["sum", "total", "mean", "first"]


def name_of(name: str, replica: int) -> str:
    """The name under which the value of a replica, counted over all workers, is saved.

    >>> name_of("accumulators/0/1", 3)
    'accumulators/0/1@3'
    """
    return f"{name}@{replica}"


def by_name(own: Mapping[str, np.ndarray]) -> dict[str, dict[int, np.ndarray]]:
    """The values by their names without the replica, then by the replica's number."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for full_name, value in own.items():
        name, _, replica = full_name.rpartition("@")
        found.setdefault(name, {})[int(replica)] = value
    return found


def merge(own_of_ranks: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Puts together what all ranks of a checkpoint saved for themselves, to be restored by another number of them.

    Args:
      own_of_ranks: what `TrainingVariables.own` returned on every rank, in their order.

    Raises:
      ValueError: two ranks have saved the same replica.

    >>> import numpy as np
    >>> sorted(merge([{"accumulators/0/0@0": np.ones(2)}, {"accumulators/0/0@1": np.ones(2)}]))
    ['accumulators/0/0@0', 'accumulators/0/0@1']
    """
    merged: dict[str, np.ndarray] = {}
    for rank, own in enumerate(own_of_ranks):
        twice = sorted(merged.keys() & own.keys())
        if twice:
            raise ValueError(
                f"Two ranks have saved the same replica. Received: {twice[0]!r} of rank {rank} and of one before it. "
                "Expected: the shards of all ranks of one checkpoint, each once."
            )
        merged.update(own)
    return merged


def share(values: Mapping[int, np.ndarray], rule: Rule, replica: int, replicas: int) -> np.ndarray:
    """What `replica` of `replicas` takes over of a value that other replicas have saved.

    Args:
      values: by the old replicas' numbers, all of one shape and dtype.
      rule: how.
      replica: from 0.
      replicas: how many there are now.

    >>> import numpy as np
    >>> saved = {0: np.array([1.0]), 1: np.array([2.0]), 2: np.array([4.0])}
    >>> [share(saved, "sum", replica, 2) for replica in range(2)]
    [array([5.]), array([2.])]
    >>> [share(saved, "total", replica, 2) for replica in range(2)]
    [array([7.]), array([0.])]
    """
    first = values[min(values)]
    if rule == "first":
        return first
    if rule == "mean":
        return _mean(list(values.values()))
    taken = [old for old in sorted(values) if (replica == 0 if rule == "total" else old % replicas == replica)]
    total = np.zeros_like(first)
    for old in taken:
        total = total + values[old]
    return np.asarray(total, dtype=first.dtype)


def _mean(values: list[np.ndarray]) -> np.ndarray:
    first = values[0]
    if all(np.array_equal(value, first) for value in values[1:]) or first.dtype.kind in "biu":
        return first
    return np.mean([value.astype(np.float64) for value in values], axis=0).astype(first.dtype)
