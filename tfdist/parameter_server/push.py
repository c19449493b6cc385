"""The update that a worker makes by itself, of what it has computed."""

from typing import Any

import tensorflow as tf

from tfdist.keras_internals.gradients import all_finite, divided, values_of
from tfdist.keras_internals.scheduled_training import count_of_updates
from tfdist.parameter_server.encoding import Encoder
from tfdist.parameter_server.worker_step import Computed
from tfdist.tensorflow_internals.parameter_server import worker_index


def push(computed: Computed, model_optimizer: Any, encoder: Encoder) -> dict[str, tf.Tensor]:
    """Updates the variables on their servers; what is added up there loses no other worker's update.

    Returns:
      What is to be told to the chief: see `facts`.
    """
    count = count_of_updates(model_optimizer)
    values = [values_of(gradient) for of_optimizer in computed.gradients for gradient in of_optimizer]
    with tf.control_dependencies(values):
        staleness = tf.cast(count.read_value(), tf.int64) - computed.updates
    sizes: list[Any] = []
    made = tf.constant(True)
    for optimizer, of_optimizer in zip(computed.optimizers, computed.gradients, strict=True):
        of_update, finite = _update(optimizer, of_optimizer, encoder)
        sizes, made = sizes + of_update, tf.logical_and(made, finite)
    for variable, change in computed.changes:
        variable.assign_add(change)
    with tf.control_dependencies([staleness]):
        count.assign_add(tf.cast(made, count.dtype))
    return facts(computed, staleness, sizes)


def _update(optimizer: Any, gradients: list[Any], encoder: Encoder) -> tuple[list[Any], tf.Tensor]:
    """Returns the sizes of what was sent, and whether the update was made."""
    scale = optimizer.loss_scale
    finite = tf.constant(True)
    if scale is not None:
        gradients = [divided(gradient, scale.value) for gradient in gradients]
        finite = all_finite(gradients)
    gradients = optimizer.clip(gradients)

    def apply() -> None:
        optimizer.apply([sent for sent, _ in encoded])
        optimizer.constrain()

    encoded = [encoder.encode(gradient, path) for gradient, path in zip(gradients, optimizer.paths, strict=True)]
    if scale is None:
        apply()
    else:
        tf.cond(finite, apply, lambda: None)
        scale.update(finite)
    return [size for _, size in encoded], finite


def facts(computed: Computed, staleness: tf.Tensor, sizes: list[Any]) -> dict[str, tf.Tensor]:
    """What a worker tells the chief of a push, int64 scalars."""
    return {
        "worker": tf.cast(worker_index(), tf.int64),
        "staleness": staleness,
        "samples": computed.samples,
        "bytes_pushed": tf.add_n([tf.cast(size, tf.int64) for size in sizes] or [tf.constant(0, tf.int64)]),
        "bytes_pulled": computed.bytes_pulled,
    }
