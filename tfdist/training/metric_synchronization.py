"""Synchronizes metrics, logs and batch statistics of the replicas after a step."""

import functools
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.gradient_tensors import flatten, unflatten
from tfdist.keras_internals.model_introspection import batch_statistics
from tfdist.losses.step_logs import are_alike, can_be_averaged, differs, metric_results, names_of
from tfdist.tensorflow_internals.collective_launcher import with_fixed_shapes
from tfdist.tensorflow_internals.merge_calls import sum_over_replicas
from tfdist.training.metric_totals import MetricTotals
from tfdist.training.sample_shares import ReplicaStep
from tfdist.training.step_guard import StepGuard


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


def synchronize_results(
    model: Any,
    step: ReplicaStep,
    parts: Sequence[PartialResult],
    *,
    training: bool,
    report: Any = None,
    stored: MetricTotals | None = None,
    guard: StepGuard | None = None,
    is_first: bool = True,
) -> tuple[Any, Any]:
    """Synchronizes the metrics, logs and batch statistics of `model` after a step, with one collective for each dtype.

    A log that is the result of a metric becomes the result over all replicas' samples. (Keras averages the replicas'
    results, with one collective for each metric, which is wrong for results that are not linear.) Any other log becomes
    the replicas' mean, weighted by their samples, or their sum if it is a part of a loss or a sum over the samples.
    Moving statistics of batch normalization become such a mean, too: they are linear in the batches, so this equals the
    statistics over all batches. They are then equal on all replicas and in the chief's checkpoints.

    `parts` are the results of the replica's micro-batches in their order, or the only one. A training step updates
    batch statistics. A `report`, a float32 tensor, is added up over the replicas, too. The sums of the metrics' states
    are `stored`, on one replica of each worker. A `guard` gets the loss, on the first one (`is_first`).

    Returns:
        The logs over all replicas, in the structure of the step's logs, and the sum of the reports.
    """
    # Metrics accumulate, so those of the last micro-batch cover all. The last one has samples if any has.
    logs = parts[-1].logs
    statistics = batch_statistics(model) if training else []
    metrics = exchanged_metrics(model)
    leaves = tf.nest.flatten(logs)
    averaged = [position for position, leaf in enumerate(leaves) if can_be_averaged(leaf)]
    own_results = metric_results(model) if metrics and isinstance(logs, dict) else []
    pairs = _possible_results(logs, own_results)
    own_losses = [] if guard is None or not training else _losses(parts)
    # A replica without samples computed its logs from zeros: they do not count.
    weight = tf.cast(step.contributes, tf.float32)

    shared = _sum_all(
        [tf.convert_to_tensor(variable.value) for variable in metrics]
        + [_shares([part.statistics[index] for part in parts], parts) for index in range(len(statistics))]
        + [_share_of_log([tf.nest.flatten(part.logs)[position] for part in parts], parts) for position in averaged]
        + [tf.cast(differs(leaves[position], own_results[index][1]), tf.float32) * weight for position, index in pairs]
        + ([] if report is None else [report])
        + ([tf.cast(_shares(own_losses, parts), tf.float32)] if own_losses else [])
    )
    loss = shared.pop() if own_losses else None
    reported = None if report is None else shared.pop()
    totals, shared = shared[: len(metrics)], shared[len(metrics) :]
    if stored is not None:
        stored.store(metrics, totals)
    for variable, value in zip(statistics, shared, strict=False):
        variable.assign(value)
    shared = shared[len(statistics) :]
    for position, value in zip(averaged, shared, strict=False):
        leaves[position] = value
    if pairs:
        with keras.StatelessScope(state_mapping=list(zip(metrics, totals, strict=True))):
            results = metric_results(model)
        # The first metric of which a log is the result on all replicas counts, so it is assigned last.
        for (position, index), differing in reversed([*zip(pairs, shared[len(averaged) :], strict=True)]):
            leaves[position] = tf.where(tf.equal(differing, 0), results[index][1], leaves[position])
    if guard is not None and training and is_first:
        if loss is None and all(part.step.logged_loss is None for part in parts):  # then no metric has counted it
            loss = dict(zip(names_of(logs), leaves, strict=True)).get("loss")
        if loss is not None:
            guard.values.store_loss(loss)
    return tf.nest.pack_sequence_as(logs, leaves), reported


def exchanged_metrics(model: Any) -> list[Any]:
    """Returns the Keras variables of metrics of `model` whose sums over all replicas each step exchanges."""
    metrics = [variable for variable in model.metrics_variables if variable.aggregation == "sum"]
    is_too_large = sum(variable.shape.num_elements() for variable in metrics) * 4 > MetricTotals.largest_bytes
    return [] if is_too_large else metrics


def _losses(parts: Sequence[PartialResult]) -> list[Any]:
    """Returns the loss of each part, or nothing if a step has logged none, or within a function of the program."""
    losses = [part.step.logged_loss for part in parts]
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    is_here = all(tf.is_tensor(loss) and getattr(loss, "graph", None) is graph for loss in losses)
    return losses if is_here else []


def _possible_results(logs: Any, results: Sequence[tuple[str, Any]]) -> list[tuple[int, int]]:
    """Returns the positions of logs and of results that may be equal: by name, otherwise any of the same kind.

    Steps often return the result of a metric under another name than the metric's.
    """
    names = names_of(logs) if results else []
    leaves = tf.nest.flatten(logs)
    pairs = []
    for position, name in enumerate(names):
        same_name = [index for index, (of, _) in enumerate(results) if of == name]
        other_name = [index for index, (of, _) in enumerate(results) if of not in names]
        pairs += [
            (position, index) for index in same_name or other_name if are_alike(leaves[position], results[index][1])
        ]
    return pairs


def _shares(values: Sequence[Any], parts: Sequence[PartialResult]) -> tf.Tensor:
    tensors = map(tf.convert_to_tensor, values)
    # A replica without samples has the fraction 0, so whatever it computed counts 0, even NaN.
    shares = [
        tf.math.multiply_no_nan(tensor, tf.cast(part.step.fraction, tensor.dtype))
        for tensor, part in zip(tensors, parts, strict=True)
    ]
    return functools.reduce(operator.add, shares)


def _share_of_log(values: Sequence[Any], parts: Sequence[PartialResult]) -> tf.Tensor:
    """Returns the replica's share of a log, as a mean over its samples."""
    if values[0].shape.rank != 0:
        return _shares(values, parts)
    return _shares([part.step.mean_of(value) for part, value in zip(parts, values, strict=True)], parts)


def _sum_all(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    by_dtype: dict[tf.DType, list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(position)
    summed: list[Any] = [None] * len(tensors)
    for positions in by_dtype.values():
        members = [tensors[position] for position in positions]
        with with_fixed_shapes():  # those of variables, and of logs that are equal on all replicas
            (summed_vector,) = sum_over_replicas([flatten(members)])
        for position, tensor in zip(positions, unflatten(summed_vector, members), strict=True):
            summed[position] = tensor
    return summed
