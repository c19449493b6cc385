"""Embeddings that are split by words or by features, also those that compute logits with the same table."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import set_mask
from tfdist.keras_internals.layer_attributes import table_of
from tfdist.model_parallel.shard_group import ShardGroup
from tfdist.tensorflow_internals.split_variables import part_size

_REVERSIBLE = getattr(keras.layers, "ReversibleEmbedding", None)  # since Keras 3.12


def is_reversible(layer: Any) -> bool:
    """Whether a layer is a `keras.layers.ReversibleEmbedding`, also a subclass with the same `call`."""
    return _REVERSIBLE is not None and getattr(type(layer), "call", None) is _REVERSIBLE.call


def is_embedding(layer: Any) -> bool:
    """Whether a layer is an embedding that can be computed from parts."""
    return type(layer) is keras.layers.Embedding or is_reversible(layer)


def embedding_call(layer: Any, group: ShardGroup, axes: Mapping[int, int]) -> Callable[..., tf.Tensor]:
    """Returns what takes the place of the `call` of an embedding.

    Args:
        layer: A layer for which `is_embedding`.
        group: Exchanges tensors.
        axes: By the id of a split variable its axis.
    """
    return partial(_reversible if is_reversible(layer) else _looked_up, layer, group, axes)


def _looked_up(layer: Any, group: ShardGroup, axes: Mapping[int, int], inputs: tf.Tensor) -> tf.Tensor:
    table = tf.convert_to_tensor(layer.embeddings)
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    if axes.get(id(table_of(layer))) != 0:
        return tf.cast(keras.ops.take(table, ids, axis=0), layer.compute_dtype)
    words = table_of(layer).shape[0]
    rows = part_size(words, group.ways)
    ids = tf.where(ids < 0, ids + words, ids)  # as Keras does
    own = ids - tf.cast(group.own_rank(), ids.dtype) * rows
    is_own, is_known = (own >= 0) & (own < rows), (ids >= 0) & (ids < words)
    # As in TensorFlow, an unknown word is an error on CPUs, and a row of zeros on GPUs.
    found = tf.gather(table, tf.where(is_own, own, tf.where(is_known, tf.zeros([], ids.dtype), rows)))
    found = tf.where(is_own[..., tf.newaxis], found, tf.zeros([], found.dtype))
    return group.sum(tf.cast(found, layer.compute_dtype))


def _reversible(
    layer: Any, group: ShardGroup, axes: Mapping[int, int], inputs: tf.Tensor, reverse: bool = False
) -> tf.Tensor:
    """Looks up rows, or multiplies whole values with the table: logits, split by words if the table is."""
    if not reverse:
        result = _looked_up(layer, group, axes, inputs)
        if layer.mask_zero:
            set_mask(result, tf.not_equal(inputs, 0))
        return result
    held = table_of(layer) if layer.tie_weights else layer.reverse_embeddings
    axis = axes.get(id(held))
    table = tf.transpose(tf.convert_to_tensor(layer.embeddings)) if layer.tie_weights else tf.convert_to_tensor(held)
    if layer.reverse_dtype is not None:
        inputs, table = tf.cast(inputs, layer.reverse_dtype), tf.cast(table, layer.reverse_dtype)
    by_words = None if axis is None else axis == (0 if layer.tie_weights else 1)
    if by_words is not None:
        inputs = group.enter(inputs) if by_words else group.part(inputs, -1)
    logits = keras.ops.matmul(inputs, table)
    if by_words is False:
        logits = group.sum(logits)
    limit = layer.logit_soft_cap
    return logits if limit is None else tf.tanh(logits / limit) * limit
