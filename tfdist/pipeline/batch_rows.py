"""Splits a batch into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class MicroBatch:
    """Which rows of a batch a micro-batch has.

    Attributes:
        first: The first row on which it computes.
        end: The end of these rows.
        num_rows: How many rows these are.
        samples: How many of them are its samples: all or, if the batch has fewer rows than micro-batches, none. Then it
            computes on the first row of the batch, and its results do not count.
        fraction: Its samples divided by those of the batch, a float32 scalar.
        is_real: 1 if it has samples, otherwise 0; a float32 scalar.
    """

    first: Any
    end: Any
    num_rows: Any
    samples: Any
    fraction: tf.Tensor
    is_real: tf.Tensor

    def rows(self, data: Any) -> Any:
        """Returns the rows of each tensor in a structure."""
        return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[self.first : self.end], data)

    def results(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the rows of a result, of which a sample may have several; none if they do not count."""
        if isinstance(self.samples, int) and self.samples:
            return tensor
        return tensor[: tf.where(tf.equal(self.samples, 0), 0, tf.shape(tensor)[0])]


def are_even(parts: Sequence[MicroBatch]) -> bool:
    """Whether all micro-batches have the same number of samples, known while tracing."""
    return all(isinstance(part.samples, int) for part in parts)


def micro_batches_of(batch: Any, parts: int) -> list[MicroBatch]:
    """Splits the rows of a batch, a structure of tensors, into `parts` nearly equal parts, in order.

    Raises:
        ValueError: A leaf is not a dense tensor with rows, or the numbers of rows differ.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
            raise ValueError(
                f"A batch cannot be split into micro-batches. Received: {leaf!r} in a batch. Expected: dense tensors "
                "whose first axis holds the samples. Convert ragged and sparse tensors (`to_tensor`, "
                "`tf.sparse.to_dense`), and repeat a value that is the same for all samples."
            )
    static = {leaf.shape[0] for leaf in leaves if leaf.shape.rank is not None and leaf.shape[0] is not None}
    if len(static) > 1:
        raise ValueError(
            f"The tensors of a batch have different numbers of samples. Received: {sorted(static)}. Expected: the same "
            "number in inputs, targets and sample weights."
        )
    rows = next(iter(static)) if static else tf.shape(leaves[0])[0]
    if isinstance(rows, int) and rows % parts == 0 and rows:
        size, fraction = rows // parts, tf.constant(1 / parts, tf.float32)
        return [MicroBatch(m * size, m * size + size, size, size, fraction, tf.constant(1.0)) for m in range(parts)]
    rows = tf.convert_to_tensor(rows)
    return [_dynamic(rows, m, parts) for m in range(parts)]


def _dynamic(rows: tf.Tensor, number: int, parts: int) -> MicroBatch:
    first, end = rows * number // parts, rows * (number + 1) // parts
    samples = end - first
    is_empty = tf.equal(samples, 0)
    return MicroBatch(
        first=tf.where(is_empty, 0, first),
        end=tf.where(is_empty, 1, end),
        num_rows=tf.where(is_empty, 1, samples),
        samples=samples,
        fraction=tf.math.divide_no_nan(tf.cast(samples, tf.float32), tf.cast(rows, tf.float32)),
        is_real=tf.where(is_empty, 0.0, 1.0),
    )
