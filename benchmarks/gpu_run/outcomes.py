"""Reads what the programs have written, and compares it."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "parity"))

from comparison import TOLERANCE, largest_difference

from gpu_run.limited_processes import CaseError

__all__ = ["TOLERANCE", "largest_difference"]


def write(folder: Path, rank: int, training: str, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
    """Writes the arrays, and facts for JSON, of a training on one worker."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{training}-{rank}.npz", **arrays)
    (folder / f"{training}-{rank}.json").write_text(json.dumps(facts))


def arrays_of(folder: Path, training: str, rank: int = 0) -> dict[str, np.ndarray]:
    """Returns the arrays that `write` has written.

    Raises:
        CaseError: There are none.
    """
    file = folder / f"{training}-{rank}.npz"
    if not file.exists():
        raise CaseError(f"no result of {training} on rank {rank} of {folder.name}")
    with np.load(file) as stored:
        return {name: stored[name] for name in stored.files}


def facts_of(folder: Path, training: str, rank: int = 0) -> dict[str, Any]:
    """Returns the facts that `write` has written."""
    return json.loads((folder / f"{training}-{rank}.json").read_text())


def are_equal(ours: dict[str, np.ndarray], others: dict[str, np.ndarray], *, only: str = "") -> bool:
    """Whether all arrays whose names start with `only` have the same bits."""
    names = [name for name in ours if name.startswith(only)]
    return names == [name for name in others if name.startswith(only)] and all(
        ours[name].tobytes() == others[name].tobytes() for name in names
    )
