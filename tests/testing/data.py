"""Samples of tests: always the same, few, and hard enough that every weight moves."""

from dataclasses import dataclass
from typing import Any

import numpy as np

_random = np.random.default_rng(0)


@dataclass(frozen=True)
class Data:
    """Inputs and targets, and the loss between them and the outputs of a model."""

    inputs: Any
    targets: Any
    loss: Any = "mse"

    def first(self, rows: int) -> "Data":
        """The first samples."""
        inputs = [one[:rows] for one in self.inputs] if isinstance(self.inputs, list) else self.inputs[:rows]
        return Data(inputs, self.targets[:rows], self.loss)


_NUMBERS = _random.normal(size=(24, 6)).astype("float32")
# Of 30 words, none twice in a batch of 8 rows: of a repeated one Keras adds the squares of its gradients, not the sums.
_WORDS = np.concatenate([_random.permutation(30)[:24].reshape(8, 3) for _ in range(3)]).astype("int32")
_SUMS = _NUMBERS.sum(axis=1, keepdims=True) + np.sin(_NUMBERS[:, :1])

# Rows of 6 numbers, and a target.
NUMBERS = Data(_NUMBERS, _SUMS)
# Rows of 3 of 30 words, and a target.
WORDS = Data(_WORDS, _SUMS)
# Both.
NUMBERS_AND_WORDS = Data([_NUMBERS, _WORDS], _SUMS)
# Rows of 6 numbers, and one of 4 classes.
CLASSES = Data(_NUMBERS, _WORDS[:, 0] % 4, "sparse_categorical_crossentropy")
# Rows of 6 steps with 3 numbers, and a target.
SEQUENCES = Data(_random.normal(size=(24, 6, 3)).astype("float32"), _SUMS)
