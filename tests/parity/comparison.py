"""Compares the outcome of a program on N replicas with the outcome of one process."""

import re
from typing import Any

import numpy as np

# Sums over replicas associate differently from sums over a batch, so every element may differ by a few units in the
# last place of the largest term: float32 has 1.2e-7. Ten to thirty updates add up; adaptive optimizers divide by the
# root of a squared gradient and so pass the relative error of small gradients on.
TOLERANCE = 5e-6


def largest_difference(ours: Any, reference: Any) -> float:
    """The largest difference between two structures of numbers, relative where a number is larger than 1."""
    if isinstance(reference, dict):
        ours, reference = _without_numbers(ours), _without_numbers(reference)
        assert set(ours) == set(reference), f"{sorted(ours)} is not {sorted(reference)}"
        return max((largest_difference(ours[key], reference[key]) for key in reference), default=0.0)
    if isinstance(reference, (list, tuple)):
        assert len(ours) == len(reference), f"{len(ours)} is not {len(reference)}"
        return max((largest_difference(a, b) for a, b in zip(ours, reference, strict=True)), default=0.0)
    ours, reference = np.asarray(ours, "float64"), np.asarray(reference, "float64")
    assert ours.shape == reference.shape, f"{ours.shape} is not {reference.shape}"
    if ours.size == 0:
        return 0.0
    difference = np.abs(ours - reference) / np.maximum(1.0, np.abs(reference))
    return float("inf") if np.isnan(difference).any() else float(difference.max())


def _without_numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Keras numbers metrics by how many it has made before: `auc_1`."""
    return {re.sub(r"_\d+$", "", name): value for name, value in logs.items()}


def plain(outcome: Any) -> Any:
    """`outcome` as JSON can hold it, exactly: a float32 is a float64."""
    if isinstance(outcome, dict):
        return {name: plain(value) for name, value in outcome.items()}
    if isinstance(outcome, (list, tuple)):
        return [plain(value) for value in outcome]
    return np.asarray(outcome).tolist()
