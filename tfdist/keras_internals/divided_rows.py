"""Programs that contain the number of rows of a global batch, of which each replica computes a part."""

import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from tfdist.keras_internals.loss_scaling import LossStep
from tfdist.tensorflow_internals.operation_origins import describe, is_of_keras
from tfdist.tensorflow_internals.sample_reductions import RANDOM

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
        parts: Into how many parts.
        rows: The rows of a part of this process, if the number is known while the step is traced.
        total: Those of the global batch, likewise.
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
        numbers = {int(number) for number in _NUMBER.findall(text)}
        if self.rows is not None and not numbers & {self.rows, self.total} and not _FIRST_AXIS.search(text):
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

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context that explains its errors."""
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
        if is_checked:
            found = (self._literal(operation, steps[0]) for operation in _operations()[first:])
            tensor = next((tensor for tensor in found if tensor is not None), None)
            if tensor is not None:
                self._warn(describe(tensor))

    def _literal(self, operation: tf.Operation, step: LossStep) -> tf.Tensor | None:
        """Returns noise that stands for the samples of a global batch, or what is concatenated with samples."""

        def is_literal(tensor: tf.Tensor) -> bool:
            return bool(tensor.shape.rank) and tensor.shape[0] == self.total and not step.holds_samples(tensor)

        if operation.type in RANDOM:
            tensor = operation.outputs[0]
            return tensor if is_literal(tensor) and not is_of_keras(tensor) else None
        if operation.type == "ConcatV2":
            *parts, axis = operation.inputs
            if (
                tf.get_static_value(axis) in (0, -(parts[0].shape.rank or 0))
                and any(map(is_literal, parts))
                and any(map(step.holds_samples, parts))
            ):
                return operation.outputs[0]
        return None

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


def _operations() -> list[tf.Operation]:
    return list(tf.compat.v1.get_default_graph().get_operations())
