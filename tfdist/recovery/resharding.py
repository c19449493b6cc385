"""Converts per-replica state and accumulated micro-steps to another number of workers."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

# How values of N replicas become values of M replicas. "sum": the sum over all replicas stays. "total": the sum stays,
# all of it on replica 0. "mean": every replica gets the common value, else the mean. "first": every replica gets the
# value of replica 0.
Rule = Literal["sum", "total", "mean", "first"]


def replica_name(name: str, replica: int) -> str:
    """Returns the name under which the value of a replica is saved. Replicas are numbered over all workers.

    >>> replica_name("accumulators/0/1", 3)
    'accumulators/0/1@3'
    """
    return f"{name}@{replica}"


def is_replica_name(name: str) -> bool:
    """Whether `replica_name` returned this name."""
    return name.rpartition("@")[2].isdecimal() and "@" in name


def group_by_variable(values: Mapping[str, np.ndarray]) -> dict[str, dict[int, np.ndarray]]:
    """Groups values with a `replica_name` by variable, then by replica."""
    by_variable: dict[str, dict[int, np.ndarray]] = {}
    for full_name, value in values.items():
        name, _, replica = full_name.rpartition("@")
        by_variable.setdefault(name, {})[int(replica)] = value
    return by_variable


def merge_ranks(values_of_ranks: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Merges the per-replica values of all ranks of a checkpoint, to restore them on another number of ranks.

    Args:
        values_of_ranks: What `VariableSnapshots.per_replica` returned on every rank, in the order of ranks.

    Raises:
        ValueError: If two ranks saved the same replica.

    >>> import numpy as np
    >>> sorted(merge_ranks([{"accumulators/0/0@0": np.ones(2)}, {"accumulators/0/0@1": np.ones(2)}]))
    ['accumulators/0/0@0', 'accumulators/0/0@1']
    """
    merged: dict[str, np.ndarray] = {}
    for rank, values in enumerate(values_of_ranks):
        duplicates = sorted(merged.keys() & values.keys())
        if duplicates:
            raise ValueError(
                f"Two ranks saved the same replica. Received: {duplicates[0]!r} of rank {rank} and of an earlier rank. "
                "Expected: the shards of all ranks of one checkpoint, each once."
            )
        merged.update(values)
    return merged


def reshard(values: Mapping[int, np.ndarray], rule: Rule, replica: int, num_replicas: int) -> np.ndarray:
    """Returns the value of one replica, computed from the values that another number of replicas saved.

    Args:
        values: The saved values by replica, all of the same shape and dtype.
        rule: How to convert.
        replica: The replica, from 0.
        num_replicas: How many replicas there are now.

    >>> import numpy as np
    >>> saved = {0: np.array([1.0]), 1: np.array([2.0]), 2: np.array([4.0])}
    >>> [reshard(saved, "sum", replica, 2) for replica in range(2)]
    [array([5.]), array([2.])]
    >>> [reshard(saved, "total", replica, 2) for replica in range(2)]
    [array([7.]), array([0.])]
    """
    first = values[min(values)]
    if rule == "first":
        return first
    if rule == "mean":
        return _mean(list(values.values()))
    taken = [old for old in sorted(values) if (replica == 0 if rule == "total" else old % num_replicas == replica)]
    total = np.zeros_like(first)
    for old in taken:
        total = total + values[old]
    return np.asarray(total, dtype=first.dtype)


def _mean(values: list[np.ndarray]) -> np.ndarray:
    first = values[0]
    if all(np.array_equal(value, first) for value in values[1:]) or first.dtype.kind in "biu":
        return first
    return np.mean([value.astype(np.float64) for value in values], axis=0).astype(first.dtype)


class AccumulationProgress(NamedTuple):
    """Where gradient accumulation resumes.

    Attributes:
        micro_steps: Micro-steps since training began, in terms of the new number per update.
        factor: The factor for the accumulators.
    """

    micro_steps: int
    factor: float


def convert_micro_steps(micro_steps: int, old_per_update: int, new_per_update: int) -> AccumulationProgress:
    """Converts a number of micro-steps to another number per update. The number of updates stays.

    With `n` times fewer replicas and `n` times more micro-steps per update, a half accumulated update stays half
    accumulated. A fraction of a micro-step is rounded down: the mean of the accumulated gradients counts as that many
    micro-steps, and less than one micro-step is dropped.

    >>> convert_micro_steps(9, old_per_update=2, new_per_update=4)
    AccumulationProgress(micro_steps=18, factor=2.0)
    >>> convert_micro_steps(11, old_per_update=4, new_per_update=2)
    AccumulationProgress(micro_steps=5, factor=0.3333333333333333)
    >>> convert_micro_steps(7, old_per_update=4, new_per_update=4)
    AccumulationProgress(micro_steps=7, factor=1.0)
    """
    updates, remainder = divmod(micro_steps, old_per_update)
    new_remainder = remainder * new_per_update // old_per_update
    return AccumulationProgress(
        updates * new_per_update + new_remainder, new_remainder / remainder if remainder else 1.0
    )
