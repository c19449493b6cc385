"""Which logs of a step are results of the model's metrics, and which are the step's own values."""

from typing import Any

import keras
import tensorflow as tf


def metric_results(model: Any) -> list[tuple[str, Any]]:
    """Returns the names and results of all metrics of a model; names may occur several times."""
    results: list[tuple[str, Any]] = []
    for metric in model.metrics:
        result = metric.result()
        results += result.items() if isinstance(result, dict) else [(metric.name, result)]
    # A metric may return one of its variables.
    return [(name, tf.convert_to_tensor(result)) for name, result in results]


def names_of(logs: Any) -> list[str]:
    """Returns the name of each leaf."""
    return [str(path[-1]) for path, _ in keras.tree.flatten_with_path(logs)]


def differs(log: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
    """Returns whether a log differs from a metric's result, a bool scalar."""
    same = tf.equal(log, result)
    if log.dtype.is_floating:
        same |= tf.math.is_nan(log) & tf.math.is_nan(result)
    return tf.reduce_any(~same)


def can_be_averaged(value: Any) -> bool:
    """Whether a log is a floating-point tensor whose shape does not depend on the samples."""
    return tf.is_tensor(value) and value.dtype.is_floating and value.shape.is_fully_defined()


def are_alike(log: Any, result: Any) -> bool:
    """Whether a log and a result of a metric can be compared and may be equal."""
    alike = tf.is_tensor(log) and log.shape.is_fully_defined() and (log.dtype.is_floating or log.dtype.is_integer)
    return alike and log.shape == result.shape and log.dtype == result.dtype
