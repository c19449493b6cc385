"""Reads the clock in a graph, and orders what is timed after the reading.

TensorFlow executes what is ready in any order. So it may read a clock that waits for some tensors long after these are
there, and first compute what uses them: once it has learned how long operations take, it does so in each step, if it
has one thread. Nothing is timed unless it waits for the clock.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.independent_operations import leave_unordered


def read_clock(ready: Sequence[Any], host: str) -> tf.Tensor:
    """Returns the time, in nanoseconds, when all of `ready` is computed, an int64 scalar on `host`.

    `ready` are tensors, with an earlier reading if there is one, or `tf.IndexedSlices`.
    """
    with tf.control_dependencies(_values(ready)), tf.device(host):
        seconds = _seconds()
        # Later operations, including other replicas' collectives, would wait for it.
        leave_unordered(seconds)
        return tf.cast(seconds * 1e9, tf.int64)  # to 256 ns


def after_clocks(readings: Sequence[tf.Tensor], tensors: Sequence[Any]) -> list[Any]:
    """Returns `tensors`, dense or `tf.IndexedSlices`, such that what uses them waits for all `readings`."""
    with tf.control_dependencies(readings):
        return [
            tf.IndexedSlices(tf.identity(tensor.values), tensor.indices, tensor.dense_shape)
            if isinstance(tensor, tf.IndexedSlices)
            else tf.identity(tensor)
            for tensor in tensors
        ]


def _values(tensors: Sequence[Any]) -> list[tf.Tensor]:
    return [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]


def _seconds() -> tf.Tensor:
    return tf.timestamp()
