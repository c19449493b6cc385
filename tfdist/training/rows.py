"""Shares out the rows of a batch that was not distributed: what `train_on_batch` and its like are given."""

from typing import Any

import tensorflow as tf

from tfdist.training.step import count_samples


def is_distributed(data: Any) -> bool:
    """Whether a strategy has distributed `data` already."""
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(data))


def rows_of_part(data: Any, counted: Any, part: int, parts: int) -> Any:
    """The rows of one of `parts` nearly equal parts of a batch, in their order.

    Args:
      data: a structure of tensors (dense, ragged or sparse) or arrays; every leaf with as many rows as `counted`,
        as far as they are known, is cut.
      counted: the leaf, of rank 1 or more, whose rows are the samples.
      part: which part, from 0.
      parts: how many there are.
    """
    static = counted.shape[0]
    samples = count_samples(counted) if static is None else int(static)
    first, end = part * samples // parts, (part + 1) * samples // parts

    def cut(leaf: Any) -> Any:
        if not has_rows(leaf) or None not in (static, leaf.shape[0]) and leaf.shape[0] != static:
            return leaf
        return _sparse_rows(leaf, first, end) if isinstance(leaf, tf.SparseTensor) else leaf[first:end]

    return tf.nest.map_structure(cut, data)


def has_rows(leaf: Any) -> bool:
    """Whether `leaf` is an array or a tensor that is no scalar, as far as its rank is known."""
    shape = getattr(leaf, "shape", ())
    return shape.rank != 0 if isinstance(shape, tf.TensorShape) else len(shape) > 0


def _sparse_rows(leaf: tf.SparseTensor, first: Any, end: Any) -> tf.SparseTensor:
    others = leaf.dense_shape[1:]
    start = tf.concat([[tf.cast(first, tf.int64)], tf.zeros_like(others)], axis=0)
    return tf.sparse.slice(leaf, start, tf.concat([[tf.cast(end - first, tf.int64)], others], axis=0))
