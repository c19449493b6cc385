"""What one rank, or all together, save: tensors and notes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

Json = dict[str, Any]


@dataclass(frozen=True)
class Shard:
    """Tensors by name, and notes beside them.

    Attributes:
      tensors: of any name and shape, also `()` and `(0, 3)`; every dtype of NumPy's numbers and bool, and those of
        `ml_dtypes` (bfloat16, float8).
      notes: what JSON can hold. It comes back as JSON has it: a tuple as a list, a key as a string.

    >>> import numpy as np
    >>> Shard({"kernel": np.zeros((2, 3), np.float32)}).nbytes
    24
    """

    tensors: Mapping[str, npt.NDArray[Any]]
    notes: Json = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def to_json(value: Json, what: str) -> str:
    """Returns `value` as JSON in ASCII. NaN and infinities are kept, in Python's spelling.

    Raises:
      ValueError: if it is not JSON; `what` names it.

    >>> to_json({"loss": [0.5, None]}, "the notes")
    '{"loss": [0.5, null]}'
    """
    try:
        text = json.dumps(value)
        if json.dumps(json.loads(text)) == text and isinstance(value, dict):
            return text
        problem = "two keys that JSON writes alike" if isinstance(value, dict) else f"a {type(value).__name__}"
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    raise ValueError(
        f"{what.capitalize()} of a checkpoint cannot be written as JSON. Received: {problem}. Expected: a dictionary "
        "of numbers, strings, booleans, None, lists and dictionaries with strings as keys. Put arrays into tensors, "
        "and convert NumPy's scalars with .item()."
    )
