"""Looks up rows of embedding tables on the servers that hold them."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable
from tfdist.parameter_server.worker_scope import WorkerScope, current_loss_step
from tfdist.tensorflow_internals.server_variables import look_up_version, send_as
from tfdist.tensorflow_internals.xla_functions import CannotCompileError, is_compiling


def look_up(parts: Sequence[keras.Variable], ids: tf.Tensor) -> tf.Tensor | None:
    """Looks up each distinct row once, on the server of its part; only these rows cross the network.

    The parts have the table's rows in order. If they are uneven, the first parts have one row more. The row numbers
    `ids` are int32 or int64 of any shape.

    Returns:
        The rows, of the shape of `ids` followed by the row's dimension. None while Keras builds a layer by a call, in
        which the table has a shape and no value yet.
    """
    if any(held_variable(part) is None for part in parts):
        return None
    if is_compiling():  # rows are looked up on the servers
        raise CannotCompileError
    unique, positions = tf.unique(tf.reshape(ids, [-1]))
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.shape[0])
    places, rows_of_parts = [], []
    for part, start, end in zip(parts, starts, starts[1:], strict=False):
        here = tf.where((unique >= start) & (unique < end))[:, 0] if len(parts) > 1 else None
        local = unique if here is None else tf.gather(unique, here) - start
        rows_of_parts.append(_rows(part, local))
        places.append(here)
    if len(parts) == 1:
        rows = rows_of_parts[0]
    else:
        rows = tf.dynamic_stitch([tf.cast(place, tf.int32) for place in places], rows_of_parts)
    rows = tf.gather(rows, positions)
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))
    step = current_loss_step()
    if step is not None:
        step.mark_samples(rows, ids)
    return rows


def num_parts(partitioner: object, shape: tuple[int, int]) -> int:
    """Returns into how many parts a table is split by its rows.

    Raises:
        ValueError: The partitioner splits columns.
    """
    if not callable(partitioner):
        return 1
    parts = partitioner(shape=tf.TensorShape(shape), dtype=tf.float32)
    if not parts or parts[0] < 1 or any(part != 1 for part in parts[1:]):
        raise ValueError(
            f"A table is split by its rows. Received: {parts} from variable_partitioner for a table of {shape}. "
            "Expected: a number of at least 1, then ones, as tf.distribute.experimental.partitioners return."
        )
    return min(int(parts[0]), shape[0])


def _rows(part: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    variable, scope = held_variable(part), WorkerScope.current()
    source = None if scope is None else scope.version_of(part)
    if source is None:
        with tf.device(variable.device):
            rows = tf.nn.embedding_lookup(variable, ids)
    else:
        rows = look_up_version(variable, source, ids)
    dtype = rows.dtype
    if scope is not None and scope.pull_dtype is not None and dtype == tf.float32:
        dtype = scope.pull_dtype
        rows = send_as(rows, variable.device, dtype)
    if scope is not None:
        scope.count_rows(part, ids, dtype.size * (part.shape[1:].num_elements() or 0))
    return rows
