"""Replicas without samples: at the end of the data, or if the last batch is smaller than the number of replicas.

Such a replica must take part in the collectives of its step. Many operations cannot compute without samples (with
oneDNN, TensorFlow 2.21's `Conv2D` returns a wrong shape), so the replica computes with a sample of another replica of
its process, and its results are discarded. If its process has no samples, it computes with one sample of zeros, where
these may be an input (`accepts_zeros`), and otherwise without samples.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


def filled_if_empty(data: Any, samples: Any, fillers: Any) -> Any:
    """Returns `data`, or a row of `fillers` (see `first_rows`) if there are no `samples`, an int or an int32 scalar.

    Ragged and sparse tensors are returned unchanged.
    """
    leaves, rows = tf.nest.flatten(data), tf.nest.flatten(fillers)
    dense = [position for position, leaf in enumerate(leaves) if tf.is_tensor(leaf) and _has_samples(leaf)]
    if not dense:
        return data
    chosen = tf.cond(
        tf.greater(samples, 0),
        lambda: [leaves[position] for position in dense],
        lambda: [rows[position] for position in dense],
    )
    for position, leaf in zip(dense, chosen, strict=True):
        leaves[position] = leaf
    return tf.nest.pack_sequence_as(data, leaves)


def first_rows(parts: Sequence[Any], *, or_zeros: bool) -> Any:
    """Returns the first row of several parts of a batch that has samples.

    If none has, the result is a row of zeros (`or_zeros`), or has no rows.
    """

    def first_row(*leaves: Any) -> Any:
        if not (tf.is_tensor(leaves[0]) and _has_samples(leaves[0])):
            return leaves[0]
        shape = leaves[0].shape[1:]
        if shape.is_fully_defined() and all(leaf.shape[1:] == shape for leaf in leaves):
            zeros = [tf.zeros([1, *shape], leaves[0].dtype)] if or_zeros else []
            return tf.concat([*(leaf[:1] for leaf in leaves), *zeros], axis=0)[:1]
        # Parts may be padded to different sizes.
        row = leaves[-1][:1]
        for leaf in reversed(leaves[:-1]):
            row = tf.cond(tf.greater(tf.shape(leaf)[0], 0), lambda leaf=leaf: leaf[:1], lambda row=row: row)
        if not or_zeros:
            return row
        return tf.cond(
            tf.greater(tf.shape(row)[0], 0),
            lambda: row,
            lambda: tf.zeros(tf.concat([[1], tf.shape(row)[1:]], axis=0), row.dtype),
        )

    return tf.nest.map_structure(first_row, *parts)


@contextmanager
def revert_unless(contributes: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Reverts what this replica assigns to `variables` in this context, unless it `contributes`."""
    if contributes is True:
        yield
        return
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(contributes, tf.convert_to_tensor(variable.value), value))


def drop_rows_if_empty(outputs: Any, samples: Any) -> Any:
    """Returns `outputs`, or none of their rows if there are no samples and the data was filled."""

    def kept(output: Any) -> Any:
        if not (tf.is_tensor(output) and _has_samples(output)):
            return output
        return output[: tf.where(tf.greater(samples, 0), tf.shape(output)[0], 0)]

    return tf.nest.map_structure(kept, outputs)


def _has_samples(tensor: tf.Tensor) -> bool:
    return not isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)) and bool(tensor.shape.rank)
