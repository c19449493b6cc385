"""What the replicas must know of each other after a step: metrics, logs and batch statistics."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import flatten, unflatten
from tfdist.keras_internals.models import batch_statistics, metric_variables
from tfdist.training.step import ReplicaStep, sum_over_replicas

# Up to here the state of the metrics is sent after every step. A larger one (a confusion matrix of a thousand
# classes) is left to the end of the epoch, when Keras reads it, and batch logs are the replicas' mean till then.
_LARGEST_METRIC_STATE_BYTES = 2**18


@dataclass(frozen=True)
class PartResult:
    """What a replica, or one of its micro-batches, has made of its part of a step.

    Attributes:
      step: that part.
      logs: what the step returned.
      statistics: the values of the model's `batch_statistics` after it.
    """

    step: ReplicaStep
    logs: Any
    statistics: Sequence[Any]


def synchronise(model: Any, step: ReplicaStep, parts: Sequence[PartResult], *, training: bool) -> Any:
    """Shares the metrics, the logs and the batch statistics of `model` after a step, in one collective a dtype.

    A log that is the result of a metric becomes the result over all replicas' samples; Keras takes the mean of the
    replicas' results, wrong for everything that is not linear, by one collective a metric. Any other log becomes the
    replicas' mean, weighted by their samples. Moving statistics of batch normalization become such a mean too: as
    they are linear in the batches, that is the same as if they had been kept over all of them, and every replica and
    every checkpoint of the chief has the same.

    Args:
      model: a Keras model that has run a step in this replica context.
      step: that step.
      parts: what the replica's micro-batches have made of it, in their order, or the one result of it all.
      training: whether it was a training step, which updates batch statistics.

    Returns:
      The logs over all replicas, in the structure of the step's.
    """
    # The metrics of the last micro-batch are those over all of them. It has samples if any has.
    logs = parts[-1].logs
    statistics = batch_statistics(model) if training else []
    metrics = metric_variables(model)
    if sum(variable.shape.num_elements() for variable in metrics) * 4 > _LARGEST_METRIC_STATE_BYTES:
        metrics = []
    leaves = tf.nest.flatten(logs)
    averaged = [position for position, leaf in enumerate(leaves) if _is_floating(leaf)]
    local_results = model.get_metrics_result() if metrics and isinstance(logs, dict) else {}
    # What a replica without samples has returned was computed of zeros: it has no say.
    says = tf.cast(step.contributes, tf.float32)
    differs = {name: differing * says for name, differing in _differences(logs, local_results).items()}
    names = list(differs)

    shared = _sum_all(
        [tf.convert_to_tensor(variable.value) for variable in metrics]
        + [_shares([part.statistics[index] for part in parts], parts) for index in range(len(statistics))]
        + [_shares([tf.nest.flatten(part.logs)[position] for part in parts], parts) for position in averaged]
        + [differs[name] for name in names]
    )
    totals, shared = shared[: len(metrics)], shared[len(metrics) :]
    for variable, value in zip(statistics, shared, strict=False):
        variable.assign(value)
    shared = shared[len(statistics) :]
    for position, value in zip(averaged, shared, strict=False):
        leaves[position] = value
    results = tf.nest.pack_sequence_as(logs, leaves)
    if names:
        with keras.StatelessScope(state_mapping=list(zip(metrics, totals, strict=True))):
            over_all_replicas = model.get_metrics_result()
        for name, differing in zip(names, shared[len(averaged) :], strict=True):
            results[name] = tf.where(tf.equal(differing, 0), over_all_replicas[name], results[name])
    return results


def _differences(logs: Any, local_results: dict[str, Any]) -> dict[str, tf.Tensor]:
    """By name, 0.0 if a log is the metric's result on this replica, else 1.0; for logs that may be one."""
    differs = {}
    for name, result in local_results.items():
        log = logs.get(name)
        if not (_is_floating(log) and _is_floating(result)):
            continue
        if log.shape == result.shape and log.dtype == result.dtype:
            same = tf.equal(log, result) | (tf.math.is_nan(log) & tf.math.is_nan(result))
            differs[name] = tf.cast(tf.reduce_any(~same), tf.float32)
    return differs


def _is_floating(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating and value.shape.is_fully_defined()


def _shares(values: Sequence[Any], parts: Sequence[PartResult]) -> tf.Tensor:
    total = _share(values[0], parts[0].step.fraction)
    for value, part in zip(values[1:], parts[1:], strict=True):
        total += _share(value, part.step.fraction)
    return total


def _share(value: Any, fraction: Any) -> tf.Tensor:
    # A replica without samples has the fraction 0, and whatever it has computed of them counts 0, also NaN.
    value = tf.convert_to_tensor(value)
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
