"""What the replicas must know of each other after a step: metrics for the logs, and batch statistics."""

from collections import defaultdict
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.buckets import flatten, unflatten
from tfdist.keras_internals.models import batch_statistics, metric_variables
from tfdist.training.step import ReplicaStep, sum_over_replicas


def synchronise(model: Any, step: ReplicaStep, logs: Any, *, training: bool) -> Any:
    """Shares the metrics and the batch statistics of `model` after a step, in one collective a dtype.

    Logs become those of the metrics over all replicas' samples (Keras takes the mean of the replicas' results, wrong
    for everything that is not linear, and one collective a metric). Moving statistics of batch normalization become
    the replicas' mean, weighted by their samples: as they are linear in the batches, that is the same as if they had
    been kept over all of them, and every replica and every checkpoint of the chief has the same.

    Args:
      model: a Keras model that has run a step in this replica context.
      step: that step.
      logs: what the step returned.
      training: whether it was a training step, which updates batch statistics.

    Returns:
      The logs over all replicas, or `logs` itself if they are not those of the model's metrics.
    """
    metrics = metric_variables(model)
    statistics = batch_statistics(model) if training else []
    weighted = [_weighted(variable, step.fraction) for variable in statistics]
    summed = _sum_all([tf.convert_to_tensor(variable.value) for variable in metrics] + weighted)
    for variable, value in zip(statistics, summed[len(metrics) :], strict=True):
        variable.assign(value)
    if not isinstance(logs, dict):
        return logs
    with keras.StatelessScope(state_mapping=list(zip(metrics, summed, strict=False))):
        results = model.get_metrics_result()
    return results if set(results) == set(logs) else logs


def _weighted(variable: keras.Variable, fraction: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(variable.value)
    return tf.math.multiply_no_nan(value, tf.cast(fraction, value.dtype))


def _sum_all(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    by_dtype: dict[tf.DType, list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(position)
    summed: list[Any] = [None] * len(tensors)
    for positions in by_dtype.values():
        members = [tensors[position] for position in positions]
        for position, tensor in zip(positions, unflatten(sum_over_replicas(flatten(members)), members), strict=True):
            summed[position] = tensor
    return summed
