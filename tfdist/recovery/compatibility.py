"""Compares a checkpoint with the model, optimizer and metrics of the program, and reports the first difference."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Json = dict[str, Any]


class VariableSpec(NamedTuple):
    """Shape and dtype of a variable, which must match, and the path by which users know it."""

    shape: tuple[int, ...]
    dtype: str
    path: str = ""

    def __str__(self) -> str:
        path = f" ({self.path})" if self.path else ""
        return f"{self.dtype} of shape {self.shape}{path}"


class Mismatch(NamedTuple):
    """A difference: what differs, its value in the checkpoint, and its value in the program."""

    what: str
    saved: str
    present: str


def mismatch_error(mismatch: Mismatch) -> ValueError:
    """Returns the error to raise for the first difference."""
    created_later = (
        " If the first step creates it, create it before `fit`: call the model or its parts on a batch."
        if mismatch.present == "none"
        else ""
    )
    return ValueError(
        f"The checkpoint does not match this program. The first difference is {mismatch.what}. Received: "
        f"{mismatch.saved} in the checkpoint. Expected: {mismatch.present}, as in this program. Restore the original "
        f"model, optimizer and metrics, or use another directory.{created_later}"
    )


def find_variable_mismatch(
    arrays: Mapping[str, np.ndarray],
    paths: Mapping[str, str],
    present: Mapping[str, VariableSpec],
    ignored: Iterable[str] = (),
) -> Mismatch | None:
    """Returns the first variable, in the program's order, that is missing on one side or has another shape or dtype.

    `arrays` are the saved values, `paths` their paths, in the order of the program that saved them. Names that start
    with one of `ignored` are left out.
    """
    prefixes = tuple(ignored)
    names = [name for name in paths if name in arrays] + sorted(set(arrays) - set(paths))
    saved = {
        name: VariableSpec(tuple(arrays[name].shape), arrays[name].dtype.name, paths.get(name, "")) for name in names
    }
    for name, spec in present.items():
        if name.startswith(prefixes):
            continue
        if name not in saved:
            return Mismatch(f"the variable {name!r}", "none", str(spec))
        if saved[name][:2] != spec[:2]:
            return Mismatch(f"the variable {name!r}", str(saved[name]), str(spec))
    for name, spec in saved.items():
        if name not in present and not name.startswith(prefixes):
            return Mismatch(f"the variable {name!r}", str(spec), "none")
    return None


def find_optimizer_mismatch(saved: Sequence[Json], present: Sequence[Json]) -> Mismatch | None:
    """Returns the first difference between optimizers: their class, or a setting that changes what their state means.

    >>> find_optimizer_mismatch([{"kind": "Adam", "settings": {}}], [{"kind": "SGD", "settings": {}}])
    Mismatch(what='the optimizer', saved='Adam', present='SGD')
    """
    for old, new in zip(saved, present, strict=False):
        if old["kind"] != new["kind"]:
            return Mismatch("the optimizer", old["kind"], new["kind"])
        for setting in {**new["settings"], **old["settings"]}:
            values = [description["settings"].get(setting) for description in (old, new)]
            if values[0] != values[1]:
                what = f"the optimizer {new['kind']}'s {setting}"
                return Mismatch(what, f"{setting}={values[0]!r}", f"{setting}={values[1]!r}")
    if len(saved) != len(present):
        kinds = [[description["kind"] for description in side] for side in (saved, present)]
        return Mismatch("the number of optimizers", str(kinds[0]), str(kinds[1]))
    return None
