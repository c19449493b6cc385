"""What batches are made of, in terms that two runs can compare, whatever their numbers of workers."""

from typing import Any

import keras

Description = list[list[Any]]  # a part's path, its dtype, and its dimensions but for the batch's, None if unknown


def described(element_spec: Any, *, with_sizes: bool = True) -> Description:
    """Describes the parts of a batch.

    Args:
      element_spec: the structure of `tf.TypeSpec`s of the batches, of a `tf.data.Dataset` or of a distributed one.
      with_sizes: whether the sizes of dimensions are those of all batches. If not, only their number is told.

    >>> import tensorflow as tf
    >>> described({"image": tf.TensorSpec([None, 8, 8]), "label": tf.TensorSpec([32], tf.int64)})
    [['image', 'float32', [8, 8]], ['label', 'int64', []]]
    """
    parts = []
    for path, spec in keras.tree.flatten_with_path(element_spec):
        spec = getattr(spec, "_value_specs", [spec])[0]  # of the first replica
        if hasattr(spec, "dtype") and hasattr(spec, "shape"):
            rank = spec.shape.rank
            sizes = None if rank is None else [size if with_sizes else None for size in spec.shape.as_list()[1:]]
            parts.append(["/".join(str(step) for step in path), spec.dtype.name, sizes])
    return parts


def first_difference(before: Description, now: Description) -> tuple[str, str, str] | None:
    """The first part that differs: its path, what it was, and what it is; `None` if all agree as far as is known.

    >>> first_difference([["0", "float32", [3]], ["1", "int64", []]], [["0", "float32", [3]], ["1", "float32", []]])
    ('1', 'int64 of shape (…)', 'float32 of shape (…)')
    """
    for number in range(max(len(before), len(now))):
        one, other = (side[number] if number < len(side) else None for side in (before, now))
        if one is None or other is None or one[:2] != other[:2] or not _agree(one[2], other[2]):
            return (one or other or [""])[0] or "0", _text(one), _text(other)
    return None


def _agree(one: list[int | None] | None, other: list[int | None] | None) -> bool:
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def _text(part: list[Any] | None) -> str:
    if part is None:
        return "none"
    sizes = "of any shape" if part[2] is None else f"of shape ({', '.join(['…', *(str(size) for size in part[2])])})"
    return f"{part[1]} {sizes}".replace("None", "?")
