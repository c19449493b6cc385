"""Reads the clock in a graph, and orders what is timed after the reading.

TensorFlow executes what is ready in any order. So it may read a clock that waits for some tensors long after these are
there, and first compute what uses them: once it has learned how long operations take, it does so in each step, if it
has one thread. Nothing is timed unless it waits for the clock.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def read_clock(ready: Sequence[Any], never_constant: tf.Tensor, host: str) -> tf.Tensor:
    """Returns the time, in nanoseconds, when all of `ready` is computed, an int64 scalar.

    Args:
        ready: Tensors or `tf.IndexedSlices`.
        never_constant: An int64 scalar that is an input of the reading. If all inputs were constants, TensorFlow would
            read the clock once for all steps.
        host: The CPU device of a worker.
    """
    # A stateless function: TensorFlow would run stateful ones in program order, so that later operations, including
    # other replicas' collectives, would wait for them.
    with tf.control_dependencies(_values(ready)), tf.device(host):
        read = tf.numpy_function(_nanoseconds, [never_constant], tf.int64, stateful=False)
        return tf.ensure_shape(read, [])


def after_clocks(readings: Sequence[tf.Tensor], tensors: Sequence[Any]) -> list[Any]:
    """Returns `tensors`, dense or `tf.IndexedSlices`, such that what uses them waits for all `readings`."""
    with tf.control_dependencies(readings):
        return [
            tf.IndexedSlices(tf.identity(one.values), one.indices, one.dense_shape)
            if isinstance(one, tf.IndexedSlices)
            else tf.identity(one)
            for one in tensors
        ]


def _values(tensors: Sequence[Any]) -> list[tf.Tensor]:
    return [one.values if isinstance(one, tf.IndexedSlices) else one for one in tensors]


def _nanoseconds(*_: Any) -> np.int64:
    return np.int64(time.perf_counter_ns())
