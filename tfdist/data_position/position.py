"""The position in the training data, as a checkpoint holds it; compares it with the data and arguments of `fit`."""

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import keras

from tfdist.tensorflow_internals.input_pipeline import type_of_first_part
from tfdist.utils.json_state import from_json, to_json

Json = dict[str, Any]
# The path, the dtype and the dimensions except the batch dimension (`None` if unknown) of each part of a batch.
ElementDescriptions = list[list[Any]]

_COMPARED = {
    "kind of data": "source",
    "steps_per_epoch": "steps_per_epoch",
    "steps_per_execution": "steps_per_execution",
    "number of batches": "num_batches",
    "batch size": "batch_size",
}
_MAY_BE_UNKNOWN = ("num_batches", "batch_size")


@dataclass(frozen=True)
class Position:
    """A position between two steps, as one worker sees it: every rank saves its position.

    A batch is what one step of all replicas takes from the data. Iterators are those that `fit` has created over the
    training data: one or two per epoch, and those that build the model.

    >>> position = Position(3, (6, 0), 3, 6, None, 1, "tf.data.Dataset", {"seeds": [[1, 2]]}, logs={"loss": 0.5})
    >>> Position.from_json(position.to_json()) == position
    True
    """

    next_step: int  # the next step of the epoch, from 0; 0 at the end of an epoch
    finished: tuple[int, ...]  # number of batches drawn from each iterator that is not used any more
    current: int | None  # number of batches drawn from the iterator in use; None if the next epoch creates a new one
    num_batches: int | None  # of an iterator, if known
    steps_per_epoch: int | None  # as given to `fit`
    steps_per_execution: int  # as given to `compile`
    source: str  # the kind of data
    # Everything else that determines the order, by kind of data: seeds, states of random generators, calls of a
    # PyDataset's hooks, or its `get_state()`. Any value that `tfdist.utils.json_state.to_json` accepts.
    order: Json
    validation_drawn: tuple[int, ...] = ()  # number of batches drawn from each iterator over the validation data
    validation_shares_shuffle: bool = False  # whether the validation data comes from the shuffle of the training data
    batch_size: int | None = None  # number of samples in a batch of all workers, if known
    elements: list[Any] | None = None  # `describe_elements`, if known
    is_per_worker: bool = False  # whether each worker has a different position, in different data: other files
    logs: Json | None = None  # of the last step, if given

    @property
    def drawn(self) -> tuple[int, ...]:
        """Number of batches drawn from each iterator, the one in use last."""
        return self.finished if self.current is None else (*self.finished, self.current)

    def to_json(self) -> Json:
        """Returns the position as JSON."""
        logs = None if self.logs is None else to_json(self.logs, name="logs")
        counts = {"finished": list(self.finished), "validation_drawn": list(self.validation_drawn)}
        return {**asdict(self), **counts, "order": to_json(self.order, name="data"), "logs": logs}

    @classmethod
    def from_json(cls, json: Json) -> "Position":
        """Returns the position that `to_json` has written.

        Raises:
            ValueError: If `json` is not a position.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(json, dict) or set(json) != names:
            raise ValueError(
                f"Invalid position in the training data. Received: {sorted(json)}. Expected: {sorted(names)}. Another "
                "version of tfdist may have written it."
            )
        counts = {name: tuple(json[name]) for name in ("finished", "validation_drawn")}
        decoded = {name: from_json(json[name]) for name in ("order", "logs")}
        return cls(**{**json, **counts, **decoded})


def logs_to_save(logs: Mapping[str, Any] | None) -> Json | None:
    """Converts scalars to Python floats, as Keras gives them to callbacks; leaves other values, such as vectors.

    >>> import numpy as np
    >>> logs_to_save({"loss": np.float32(0.5), "f1": np.ones([2])})
    {'loss': 0.5, 'f1': array([1., 1.])}
    """
    if logs is None:
        return None
    converted = dict(logs)
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            converted[name] = float(value)
    return converted


def describe_elements(element_spec: Any, *, is_exact: bool = True) -> ElementDescriptions:
    """Describes the parts of a batch by the `element_spec` of a plain or distributed dataset.

    If the sizes do not hold for all batches (`is_exact`), only the number of dimensions is recorded.

    >>> import tensorflow as tf
    >>> describe_elements({"image": tf.TensorSpec([None, 8, 8]), "label": tf.TensorSpec([32], tf.int64)})
    [['image', 'float32', [8, 8]], ['label', 'int64', []]]
    """
    parts = []
    for path, spec in keras.tree.flatten_with_path(element_spec):
        spec = type_of_first_part(spec)
        if hasattr(spec, "dtype") and hasattr(spec, "shape"):
            rank = spec.shape.rank
            sizes = None if rank is None else [size if is_exact else None for size in spec.shape.as_list()[1:]]
            parts.append(["/".join(str(step) for step in path), spec.dtype.name, sizes])
    return parts


def first_difference(before: ElementDescriptions, now: ElementDescriptions) -> tuple[str, str, str] | None:
    """Returns the path, the old and the new description of the first part that differs; `None` if all agree.

    Unknown dimensions agree with any.

    >>> first_difference([["0", "float32", [3]], ["1", "int64", []]], [["0", "float32", [3]], ["1", "float32", []]])
    ('1', 'int64 of shape (…)', 'float32 of shape (…)')
    """
    for number in range(max(len(before), len(now))):
        old, new = (parts[number] if number < len(parts) else None for parts in (before, now))
        if old is None or new is None or old[:2] != new[:2] or not _sizes_agree(old[2], new[2]):
            return (old or new or [""])[0] or "0", _as_text(old), _as_text(new)
    return None


def check_same_data(position: Position, now: Mapping[str, Any], *, same_workers: bool = True) -> None:
    """Checks that the data is that of the run to resume.

    Attributes that may be unknown are compared only if both sides know them. With another number of workers the batch
    size may depend on it, and another batch size is a warning.

    Raises:
        ValueError: If anything differs; the message names the first difference.
    """
    for name, attribute in _COMPARED.items():
        before, present = getattr(position, attribute), now[attribute]
        if attribute in _MAY_BE_UNKNOWN and (before is None or present is None):
            continue
        if before != present:
            if attribute == "batch_size" and not same_workers:
                _warn_of_batch_size(present, before)
            else:
                _raise_difference(name, str(present), str(before))
    if position.elements is not None and now["elements"] is not None:
        difference = first_difference(position.elements, now["elements"])
        if difference is not None:
            path, before, present = difference
            _raise_difference(f"element {path}", present, before)


def _sizes_agree(one: list[int | None] | None, other: list[int | None] | None) -> bool:
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def _as_text(part: list[Any] | None) -> str:
    if part is None:
        return "none"
    sizes = "of any shape" if part[2] is None else f"of shape ({', '.join(['…', *(str(size) for size in part[2])])})"
    return f"{part[1]} {sizes}".replace("None", "?")


def _warn_of_batch_size(now: int, before: int) -> None:
    warnings.warn(
        f"The batch size and the number of workers have changed since the checkpoint. Received: {now}. "
        f"Expected: {before}, for all workers together. Training resumes after the same number of batches, counted in "
        "batches of the new size: in this pass over the data some samples may be seen twice and others not at all. To "
        "resume exactly, use a batch size that does not depend on the number of workers (`num_replicas_in_sync`).",
        RuntimeWarning,
        stacklevel=2,
    )


def _raise_difference(name: str, now: str, before: str) -> None:
    raise ValueError(
        f"The training data differs from that of the checkpoint in its {name}. Received: {now}. Expected: "
        f"{before}. Use the same data and arguments, or start a new training in another directory."
    )
