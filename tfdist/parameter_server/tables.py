"""Tables of embedding layers: split over the servers, and looked up there."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.keras_internals.scheduled_training import server_variable
from tfdist.parameter_server.worker_scope import WorkerScope
from tfdist.tensorflow_internals.parameter_server import sent_as


def look_up(parts: Sequence[keras.Variable], ids: tf.Tensor) -> tf.Tensor:
    """The rows `ids` of a table, looked up by the servers of its parts, each row once: only they cross the network.

    Args:
      parts: the table's rows in order, the first parts with a row more where they are not even.
      ids: int32 or int64 of any shape.

    Returns:
      Of the shape of `ids` and the row's dimension.
    """
    unique, positions = tf.unique(tf.reshape(ids, [-1]))
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.shape[0])
    places, found = [], []
    for part, start, end in zip(parts, starts, starts[1:], strict=False):
        here = tf.where((unique >= start) & (unique < end))[:, 0] if len(parts) > 1 else None
        local = unique if here is None else tf.gather(unique, here) - start
        found.append(_rows(part, local))
        places.append(here)
    if len(parts) == 1:
        rows = found[0]
    else:
        rows = tf.dynamic_stitch([tf.cast(place, tf.int32) for place in places], found)
    rows = tf.gather(rows, positions)
    return tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))


def _rows(part: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    variable, scope = server_variable(part), WorkerScope.current()
    with tf.device(variable.device):
        rows = tf.nn.embedding_lookup(variable, ids)
    dtype = rows.dtype
    if scope is not None and scope.pull_dtype is not None and dtype == tf.float32:
        dtype = scope.pull_dtype
        rows = sent_as(rows, variable.device, dtype)
    if scope is not None:
        scope.note_rows(part, ids, dtype.size * (part.shape[1:].num_elements() or 0))
    return rows
