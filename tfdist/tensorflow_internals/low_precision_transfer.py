"""Values that cross the network between workers and parameter servers in another dtype, with exact gradients."""

from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import record_operation, stop_recording, variable_accessed


def pull_as(variable: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns the value of `variable`, sent over the network as `dtype`; its gradient is that of the variable."""
    variable_accessed(variable)
    with stop_recording():
        with tf.device(variable.device):
            small = tf.cast(variable.read_value(), dtype)
        value = tf.cast(small, variable.dtype)
    record_operation("PullAs", [value], [variable.handle], lambda gradient: [gradient])
    # Keras requests the gradient by the first, optimizers find their slots by the second.
    value.handle, value._unique_id = variable.handle, variable._unique_id
    return value


def send_as(rows: tf.Tensor, device: str, dtype: tf.DType) -> tf.Tensor:
    """Returns `rows` of `device`, sent from there as `dtype`; the gradient is that of the rows."""
    with stop_recording():
        with tf.device(device):
            small = tf.cast(rows, dtype)
        value = tf.cast(small, rows.dtype)
    record_operation("SendAs", [value], [rows], lambda gradient: [gradient])
    return value
