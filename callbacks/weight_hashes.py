"""Hashes of values that are equal on all replicas, and which variables these are."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from tfdist.keras_internals.model_state import WEIGHT, OptimizerState, components, model_variables, optimizers_of
from tfdist.recovery.variable_copies import host_view

Hashes = np.ndarray  # int64


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
    return hash_arrays(host_view(variable) for variable in variables)


def hash_arrays(arrays: Iterable[np.ndarray]) -> Hashes:
    """Returns the XXH3 hash of each array's bytes, as int64."""
    return np.array([_hash(array) for array in arrays], np.uint64).view(np.int64)


def hash_all(hashes: Hashes) -> int:
    """Returns one hash for several, as a number that an int64 holds."""
    return int(hash_arrays([hashes])[0])


def _hash(values: np.ndarray) -> int:
    # NumPy gives buffers of standard dtypes only, and bytes of all.
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
