"""Hashes of the variables that are equal on all replicas, and the vote that says which replicas have others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from tfdist.keras_internals.model_state import WEIGHT, OptimizerState, components, model_variables, optimizers_of
from tfdist.recovery.variable_copies import host_view

Hashes = np.ndarray  # int64


class DifferentWeightsError(RuntimeError):
    """Replicas have different weights or slots, which are equal on all replicas between two steps.

    Attributes:
        ranks: The workers with other bits than the majority; all workers if there is no majority.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def common_variables(model: Any) -> dict[str, list[Any]]:
    """Returns this worker's copies of the weights and of the optimizers' variables, one for each device, by path."""
    found = [variable.variable for variable in model_variables(model) if variable.kind == WEIGHT]
    for optimizer in optimizers_of(model):
        found += OptimizerState(optimizer).variables
    return {
        f"{number}: {variable.path}": components(model.distribute_strategy, variable)
        for number, variable in enumerate(found)
    }


def hash_variables(variables: Sequence[Any]) -> Hashes:
    """Returns the XXH3 hash of each variable's bytes, as int64.

    >>> import tensorflow as tf
    >>> one, other = hash_variables([tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])])
    >>> bool(one == other)
    True
    """
    return np.array([_hash(host_view(variable)) for variable in variables], np.uint64).view(np.int64)


def hash_all(hashes: Hashes) -> int:
    """Returns one hash for several, as a number that an int64 holds."""
    return int(np.array([_hash(hashes)], np.uint64).view(np.int64)[0])


def _hash(values: np.ndarray) -> int:
    # NumPy gives buffers of standard dtypes only, and bytes of all.
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


@dataclass(frozen=True)
class Verdict:
    """What the hashes of all replicas say.

    Attributes:
        majority: The hash that more than half of the replicas have; `None` if there is none.
        differing: The other replicas, as pairs of the rank of a worker and the number of its device. Without a majority
            all replicas.
    """

    majority: int | None
    differing: tuple[tuple[int, int], ...] = ()


def vote(hashes: dict[tuple[int, int], int]) -> Verdict:
    """Decides by the hashes of replicas, by rank and number of the device.

    >>> vote({(0, 0): 5, (1, 0): 5, (2, 0): 7})
    Verdict(majority=5, differing=((2, 0),))
    >>> vote({(0, 0): 5, (1, 0): 7})
    Verdict(majority=None, differing=((0, 0), (1, 0)))
    """
    if not hashes:
        return Verdict(None)
    most_common, count = Counter(hashes.values()).most_common(1)[0]
    if 2 * count <= len(hashes):
        return Verdict(None, tuple(sorted(hashes)))
    return Verdict(most_common, tuple(sorted(replica for replica, own in hashes.items() if own != most_common)))
