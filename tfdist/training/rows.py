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
      data: a structure of dense tensors or arrays; every leaf with as many rows as `counted` is cut.
      counted: the leaf, of rank 1 or more, whose rows are the samples.
      part: which part, from 0.
      parts: how many there are.
    """
    static = counted.shape[0]
    samples = count_samples(tf.convert_to_tensor(counted)) if static is None else int(static)
    first, end = part * samples // parts, (part + 1) * samples // parts

    def cut(leaf: Any) -> Any:
        shape: Any = getattr(leaf, "shape", ())
        return leaf[first:end] if len(shape) and shape[0] == static else leaf

    return tf.nest.map_structure(cut, data)
