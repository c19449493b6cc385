"""Programs that contain the number of rows of a global batch, of which each replica computes a part."""

import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from tfdist.losses.loss_scaling import LossStep
from tfdist.losses.reduction_degrees import RANDOM
from tfdist.tensorflow_internals.function_graphs import describe, is_of_keras

_ABOUT_SHAPES = re.compile(r"shape|dimension|slice index|is not in \[0,", re.IGNORECASE)
_FIRST_AXIS = re.compile(r"slice index \d+ of dimension 0 out of bounds")
_NUMBER = re.compile(r"\d+")
_KINDS = (ValueError, IndexError, tf.errors.InvalidArgumentError)
_NOTE = "The rows of a batch are divided"
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class DividedRows:
    """How the rows of a batch are divided.

    Attributes:
        parts: The number of parts.
        rows: The number of rows of a part of this process, if it is known while the step is traced.
        total: The number of rows of the global batch, if it is known then.
    """

    parts: int
    rows: int | None = None
    total: int | None = None

    @classmethod
    def of(cls, counts: Sequence[int | None], replicas: int, micro_batches: int = 1) -> "DividedRows":
        """Returns what is known from the numbers of rows of some of the replicas, which stand for all."""
        known = [count for count in counts if count is not None]
        if not known or len(known) < len(counts):
            return cls(replicas * micro_batches)
        return cls(replicas * micro_batches, known[0] // micro_batches, sum(known) * replicas // len(known))

    def explain(self, error: BaseException) -> None:
        """Adds a note to an error about shapes that a part of the rows may have caused."""
        text = str(error)
        if self.parts == 1 or not isinstance(error, _KINDS) or not _ABOUT_SHAPES.search(text):
            return
        if not _FIRST_AXIS.search(text) and not self._is_named_in(text):
            return
        if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            return
        rows = "a part" if self.rows is None else f"a part of {self.rows} rows"
        total = "" if self.total is None else f" of {self.total} rows"
        error.add_note(
            f"The rows of a batch are divided along the first axis of each of its tensors. Received: {rows} of a "
            f"global batch{total}, which is divided into {self.parts}. Expected: numbers of rows from "
            "the data. Write `tf.shape(x)[0]` where the program contains the size of the global batch, such as "
            "`batch_size`, and let the first axis of each input hold the samples."
        )

    def _is_named_in(self, text: str) -> bool:
        """Whether an error names the size of the global batch, or an index beyond the rows of a part."""
        numbers = {int(number) for number in _NUMBER.findall(text)}
        if self.total is None:
            return any(number * self.parts in numbers for number in numbers - {0})
        return self.total in numbers or f"is not in [0, {self.rows})" in text

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except _KINDS as error:
            self.explain(error)
            raise

    @contextmanager
    def checked_literals(self, is_asked: bool = True) -> Iterator[list[LossStep]]:
        """Warns once of tensors with as many rows as the global batch that are made in the body.

        Append the step that the body traces on a part of the rows to the list.
        """
        steps: list[LossStep] = []
        is_checked = is_asked and self.rows != self.total and not tf.executing_eagerly()
        first = len(_operations()) if is_checked else 0
        yield steps
        tensor = self._literal(_operations()[first:], steps[0]) if is_checked else None
        if tensor is not None:
            self._warn(describe(tensor))

    def _literal(self, operations: Sequence[tf.Operation], step: LossStep) -> tf.Tensor | None:
        """Returns noise that stands for the samples of a global batch, or a concatenation with other such rows.

        Two concatenated parts of two replicas have as many rows as the global batch: then noise may be for them.
        """
        noises = []
        for operation in operations:
            tensor = operation.outputs[0] if operation.outputs else None
            if operation.type == "ConcatV2":
                *parts, axis = operation.inputs
                is_of_rows = tf.get_static_value(axis) in (0, -(parts[0].shape.rank or 0))
                if is_of_rows and any(map(step.holds_samples, parts)):
                    if self._has_rows(tensor):
                        return None
                    if any(self._has_rows(part) and not step.holds_samples(part) for part in parts):
                        return tensor
            elif operation.type in RANDOM and self._has_rows(tensor) and _has_written_shape(operation):
                noises.append(tensor)
        return next((noise for noise in noises if not is_of_keras(noise)), None)

    def _has_rows(self, tensor: tf.Tensor) -> bool:
        return bool(tensor.shape.rank) and tensor.shape[0] == self.total

    def _warn(self, line: str) -> None:
        message = (
            f"A step on {self.rows} of the {self.total} rows of a global batch makes a tensor of {self.total} rows "
            f"that are not computed from them: each of the {self.parts} parts of the batch does so, and its rows meet "
            f"others than in one process. Received: {line}. Expected: as many rows as the data has. Write "
            "`tf.shape(x)[0]` in place of the batch size."
        )
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, stacklevel=2)


def _has_written_shape(operation: tf.Operation) -> bool:
    """Whether the shape of noise is a constant, and not what `tf.shape` returns for a tensor of known shape."""
    shape = operation.inputs[0].op
    return shape.type == "Const" and not shape.name.rpartition("/")[2].startswith("Shape")


def _operations() -> list[tf.Operation]:
    return list(tf.compat.v1.get_default_graph().get_operations())
