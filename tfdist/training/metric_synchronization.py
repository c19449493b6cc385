"""Synchronizes metrics, logs and batch statistics of the replicas after a step."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.gradient_tensors import flatten, unflatten
from tfdist.keras_internals.model_introspection import batch_statistics, metric_variables
from tfdist.tensorflow_internals.merge_calls import sum_over_replicas
from tfdist.training.sample_shares import ReplicaStep

# Metric states up to this size are sent after each step. Larger ones (a confusion matrix of 1,000 classes) are sent at
# the end of the epoch, when Keras reads them; until then batch logs are the replicas' mean.
_LARGEST_METRIC_STATE_BYTES = 2**18


@dataclass(frozen=True)
class PartialResult:
    """The result of a replica, or of one of its micro-batches, for its part of a step.

    Attributes:
        step: The part of the step.
        logs: The return value of the step.
        statistics: The values of the model's `batch_statistics` after the step.
    """

    step: ReplicaStep
    logs: Any
    statistics: Sequence[Any]


def synchronize_results(model: Any, step: ReplicaStep, parts: Sequence[PartialResult], *, training: bool) -> Any:
    """Synchronizes the metrics, logs and batch statistics of `model` after a step, with one collective for each dtype.

    A log that is the result of a metric becomes the result over all replicas' samples. (Keras averages the replicas'
    results, with one collective for each metric, which is wrong for results that are not linear.) Any other log becomes
    the replicas' mean, weighted by their samples, or their sum if it is a part of a loss or a sum over the samples.
    Moving statistics of batch normalization become such a mean, too: they are linear in the batches, so this equals the
    statistics over all batches. They are then equal on all replicas and in the chief's checkpoints.

    Args:
        model: A Keras model that has run a step in this replica context.
        step: The step.
        parts: The results of the replica's micro-batches in their order, or the only result.
        training: Whether it was a training step, which updates batch statistics.

    Returns:
        The logs over all replicas, in the structure of the step's logs.
    """
    # Metrics accumulate, so those of the last micro-batch cover all. The last one has samples if any has.
    logs = parts[-1].logs
    statistics = batch_statistics(model) if training else []
    metrics = metric_variables(model)
    if sum(variable.shape.num_elements() for variable in metrics) * 4 > _LARGEST_METRIC_STATE_BYTES:
        metrics = []
    leaves = tf.nest.flatten(logs)
    averaged = [position for position, leaf in enumerate(leaves) if _is_floating(leaf)]
    local_results = model.get_metrics_result() if metrics and isinstance(logs, dict) else {}
    # A replica without samples computed its logs from zeros: they do not count.
    weight = tf.cast(step.contributes, tf.float32)
    differs = {name: differing * weight for name, differing in _differences(logs, local_results).items()}
    names = list(differs)

    shared = _sum_all(
        [tf.convert_to_tensor(variable.value) for variable in metrics]
        + [_shares([part.statistics[index] for part in parts], parts) for index in range(len(statistics))]
        + [_share_of_log([tf.nest.flatten(part.logs)[position] for part in parts], parts) for position in averaged]
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
            group = _group_with(name, results)
            group[name] = tf.where(tf.equal(differing, 0), over_all_replicas[name], group[name])
    return results


def _differences(logs: Any, local_results: dict[str, Any]) -> dict[str, tf.Tensor]:
    """Returns 0.0 for each log that equals the metric's result on this replica, else 1.0; skips logs that cannot."""
    differs = {}
    for name, result in local_results.items():
        log: Any = _group_with(name, logs).get(name)
        if not (_is_floating(log) and _is_floating(result)):
            continue
        if log.shape == result.shape and log.dtype == result.dtype:
            same = tf.equal(log, result) | (tf.math.is_nan(log) & tf.math.is_nan(result))
            differs[name] = tf.cast(tf.reduce_any(~same), tf.float32)
    return differs


def _group_with(name: str, logs: dict[str, Any]) -> dict[str, Any]:
    """Returns the dictionary that has the log `name`: `logs`, or the results of the compiled metrics in it."""
    groups = (group for group in logs.values() if isinstance(group, dict))
    return logs if name in logs else next((group for group in groups if name in group), logs)


def _is_floating(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating and value.shape.is_fully_defined()


def _shares(values: Sequence[Any], parts: Sequence[PartialResult]) -> tf.Tensor:
    total = _share(values[0], parts[0].step.fraction)
    for value, part in zip(values[1:], parts[1:], strict=True):
        total += _share(value, part.step.fraction)
    return total


def _share_of_log(values: Sequence[Any], parts: Sequence[PartialResult]) -> tf.Tensor:
    """Returns the replica's share of a log, as a mean over its samples."""
    if values[0].shape.rank != 0:
        return _shares(values, parts)
    return _shares([part.step.mean_of(value) for part, value in zip(parts, values, strict=True)], parts)


def _share(value: Any, fraction: Any) -> tf.Tensor:
    # A replica without samples has the fraction 0, so whatever it computed counts 0, even NaN.
    value = tf.convert_to_tensor(value)
    return tf.math.multiply_no_nan(value, tf.cast(fraction, value.dtype))


def _sum_all(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    by_dtype: dict[tf.DType, list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(position)
    summed: list[Any] = [None] * len(tensors)
    for positions in by_dtype.values():
        members = [tensors[position] for position in positions]
        (summed_vector,) = sum_over_replicas([flatten(members)])
        for position, tensor in zip(positions, unflatten(summed_vector, members), strict=True):
            summed[position] = tensor
    return summed
