"""Compares the data and the arguments of `fit` with those of the run to resume."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.data_position.position import Position
from tfdist.tensorflow_internals.input_pipeline import type_of_first_part

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


def describe_elements(element_spec: Any, *, is_exact: bool = True) -> ElementDescriptions:
    """Describes the parts of a batch.

    Args:
        element_spec: The structure of `tf.TypeSpec`s of the batches, of a `tf.data.Dataset` or a distributed one.
        is_exact: Whether the sizes hold for all batches. If not, only the number of dimensions is recorded.

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
        one, other = (side[number] if number < len(side) else None for side in (before, now))
        if one is None or other is None or one[:2] != other[:2] or not _sizes_agree(one[2], other[2]):
            return (one or other or [""])[0] or "0", _as_text(one), _as_text(other)
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
        f"{before}. Give `fit` the same data and arguments, or start a new training in another directory."
    )
