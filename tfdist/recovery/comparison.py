"""Whether a checkpoint is of this model, optimizer and metrics: what differs first, said before anything is touched."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]


class Signature(NamedTuple):
    """What a variable must have in common with what is assigned to it, and the path that people know it by."""

    shape: tuple[int, ...]
    dtype: str
    path: str = ""

    def __str__(self) -> str:
        path = f" ({self.path})" if self.path else ""
        return f"{self.dtype} of shape {self.shape}{path}"


class Difference(NamedTuple):
    """Something that differs, what the checkpoint has, and what the program has."""

    what: str
    saved: str
    present: str


def other_training(difference: Difference) -> ValueError:
    """The error to raise for the first difference."""
    return ValueError(
        f"The checkpoint is of another training. The first difference is {difference.what}. Received: "
        f"{difference.saved} in the checkpoint. Expected: {difference.present}, as in this program. Make the model, "
        "the optimizer and the metrics as they were, or give another directory."
    )


def different_variable(saved: Mapping[str, Signature], present: Mapping[str, Signature]) -> Difference | None:
    """The first variable, in the order of the program, that is missing on one side or has another shape or dtype."""
    for name, signature in present.items():
        if name not in saved:
            return Difference(f"the variable {name!r}", "none", str(signature))
        if saved[name][:2] != signature[:2]:
            return Difference(f"the variable {name!r}", str(saved[name]), str(signature))
    for name, signature in saved.items():
        if name not in present:
            return Difference(f"the variable {name!r}", str(signature), "none")
    return None


def different_optimizer(saved: Sequence[Json], present: Sequence[Json]) -> Difference | None:
    """The first difference between descriptions of optimizers: their kind, or what gives their state its meaning.

    >>> different_optimizer([{"kind": "Adam", "meaning": {}}], [{"kind": "SGD", "meaning": {}}])
    Difference(what='the optimizer', saved='Adam', present='SGD')
    """
    for old, new in zip(saved, present, strict=False):
        if old["kind"] != new["kind"]:
            return Difference("the optimizer", old["kind"], new["kind"])
        for setting in {**new["meaning"], **old["meaning"]}:
            values = [description["meaning"].get(setting) for description in (old, new)]
            if values[0] != values[1]:
                return Difference(
                    f"the optimizer {new['kind']}'s {setting}", f"{setting}={values[0]!r}", f"{setting}={values[1]!r}"
                )
    if len(saved) != len(present):
        kinds = [[description["kind"] for description in side] for side in (saved, present)]
        return Difference("the number of optimizers", str(kinds[0]), str(kinds[1]))
    return None
