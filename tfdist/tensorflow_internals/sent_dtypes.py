"""Dtypes that TensorFlow's collectives do not send: as their bits, or added up in another dtype."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Of the kernels for CPUs and GPUs alike, but for what GPUs sum.
GATHERED = (tf.float32, tf.float16, tf.float64, tf.int32, tf.int64)
SUMMED = (tf.bfloat16, *GATHERED)
# TensorFlow's executor of collectives refuses to reduce int32 on GPUs, where its kernels keep int32 on the host.
SUMMED_BY_GPUS = tuple(dtype for dtype in SUMMED if dtype != tf.int32)

# `tf.bitcast` does not take these; what it takes holds each of their values.
AS_VALUES = {
    "bool": tf.uint8,
    "int4": tf.int8,
    "uint4": tf.uint8,
    "float8_e4m3fn": tf.float16,
    "float8_e5m2": tf.float16,
}
# Whole numbers wrap around in the wider dtype as they do in their own.
_SUMMED_AS_VALUES = {
    "int8": tf.int32,
    "uint8": tf.int32,
    "int16": tf.int32,
    "uint16": tf.int32,
    "int4": tf.int32,
    "uint4": tf.int32,
    "float8_e4m3fn": tf.float32,
    "float8_e5m2": tf.float32,
}
_SUMMED_AS_BITS = {"uint32": tf.int32, "uint64": tf.int64, "complex64": tf.float32, "complex128": tf.float64}


def to_words(rows: tf.Tensor) -> tf.Tensor:
    """Returns the bits of `[rows, length]` as int32, which all collectives of CPUs and GPUs can send."""
    rows = _cast(rows, AS_VALUES.get(rows.dtype.name, rows.dtype))
    count, length = (tf.shape(rows)[axis] if size is None else size for axis, size in enumerate(rows.shape))
    per_word = 4 // rows.dtype.size if rows.dtype.size < 4 else 1
    if per_word > 1:
        rows = tf.pad(rows, [[0, 0], [0, -length % per_word]])
        return tf.bitcast(tf.reshape(rows, [count, -1, per_word]), tf.int32)
    return tf.reshape(tf.bitcast(rows, tf.int32), [count, length * rows.dtype.size // 4])


def from_words(words: tf.Tensor, dtype: tf.DType, count: Any, length: Any) -> tf.Tensor:
    """Returns the `count` rows of `length` values that `to_words` has encoded."""
    sent = AS_VALUES.get(dtype.name, dtype)
    if sent.size > 4:
        words = tf.reshape(words, [count, length, sent.size // 4])
    if sent == tf.complex128:  # of doubles: TensorFlow makes one of two bitcasts, which there is no kernel for
        parts = tf.bitcast(tf.reshape(words, [count, length, 2, 2]), tf.float64)
        return tf.complex(parts[..., 0], parts[..., 1])
    rows = tf.bitcast(words, sent)
    if sent.size < 4:
        rows = tf.reshape(rows, [count, -1])[:, :length]
    return _cast(tf.reshape(rows, [count, length]), dtype)


def as_sum(tensor: tf.Tensor, *, by_gpus: bool) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns a tensor that can be summed over replicas, and a function from this sum to that of `tensor`."""
    sent, restored = _as_sum(tensor)
    if by_gpus and sent.dtype not in SUMMED_BY_GPUS:
        return tf.cast(sent, tf.int64), lambda total: restored(tf.cast(total, tf.int32))
    return sent, restored


def _as_sum(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    dtype = tensor.dtype
    if dtype.name in _SUMMED_AS_VALUES:
        return _cast(tensor, _SUMMED_AS_VALUES[dtype.name]), lambda total: _cast(total, dtype)
    if dtype.name in _SUMMED_AS_BITS:
        return tf.bitcast(tensor, _SUMMED_AS_BITS[dtype.name]), lambda total: tf.bitcast(total, dtype)
    return tensor, lambda total: total


def as_values(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns a tensor in a dtype that has kernels, with the same values, and a function back to its dtype."""
    dtype = tensor.dtype
    return _cast(tensor, AS_VALUES.get(dtype.name, dtype)), lambda values: _cast(values, dtype)


def as_words(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns the bits of a tensor, a vector, and a function from such bits, of any tensor like it, to the tensor."""
    shape, static, dtype = tf.shape(tensor), tensor.shape, tensor.dtype
    length = tf.size(tensor) if static.num_elements() is None else static.num_elements()

    def restored(words: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.reshape(from_words(words[tf.newaxis], dtype, 1, length), shape), static)

    return to_words(tf.reshape(tensor, [1, length]))[0], restored


def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)
