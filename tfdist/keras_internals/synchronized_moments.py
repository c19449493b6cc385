"""Means and variances over all replicas, for synchronized batch normalization: only rows that are samples count."""

from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import of_running_step

_nn = private("keras.src.backend.tensorflow:nn", "calls the moments over all replicas")
_stock = private("keras.src.backend.tensorflow.nn:_compute_moments_sync", "counts the rows of replicas without samples")


@patch
def patch_synchronized_moments() -> None:
    """Leaves the rows of replicas without samples out of the moments over all replicas."""

    @replace(_nn, "_compute_moments_sync")
    def moments(x: Any, axes: Any, keepdims: bool) -> Any:
        context, counts = tf.distribute.get_replica_context(), of_running_step(lambda hooks: hooks.has_samples())
        return _stock(x, axes, keepdims) if counts is None or not context else _moments(x, axes, keepdims, counts)


def _moments(x: Any, axes: Any, keepdims: bool, counts: Any) -> tuple[tf.Tensor, tf.Tensor]:
    @tf.custom_gradient
    def without_gradient(*totals: tf.Tensor) -> Any:
        return [tf.identity(total) for total in totals], lambda *upstream: _or_zeros(upstream, counts)

    # The gradient of a number depends on whether it is static: some replicas would reduce it, and others not.
    rows = tf.stop_gradient(tf.ones_like(x))
    sums = [tf.reduce_sum(values, axis=axes, keepdims=True) for values in (x, tf.square(x), rows)]
    total, squares, number = without_gradient(
        *tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, _or_zeros(sums, counts))
    )
    mean = tf.math.divide_no_nan(total, number)
    variance = tf.maximum(tf.math.divide_no_nan(squares, number) - tf.square(mean), 0.0)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def _or_zeros(values: Any, counts: Any) -> list[tf.Tensor]:
    return list(values) if counts is True else [tf.where(counts, value, tf.zeros_like(value)) for value in values]
