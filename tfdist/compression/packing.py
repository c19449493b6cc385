"""Tensors packed to one vector, to travel together."""

from collections.abc import Sequence

import tensorflow as tf


def flatten(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates `tensors`, of one dtype and any shapes, to one vector."""
    if len(tensors) == 1:
        return tf.reshape(tensors[0], [-1])
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def unflatten(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits what `flatten` made of tensors shaped as `like`."""
    if len(like) == 1:
        return [tf.reshape(vector, tf.shape(like[0]) if like[0].shape.num_elements() is None else like[0].shape)]
    parts = tf.split(vector, [tensor.shape.num_elements() for tensor in like])
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, like, strict=True)]
