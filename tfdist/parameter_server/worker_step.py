"""Computes gradients, metrics and changes of other variables for the batches of a worker."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.gradient_tensors import values_of
from tfdist.keras_internals.compiled_calls import jit_compiles_on_workers
from tfdist.keras_internals.losses import means_of_outputs
from tfdist.keras_internals.model_introspection import first_input
from tfdist.keras_internals.scheduled_training import update_counter
from tfdist.losses.divided_rows import DividedRows
from tfdist.parameter_server.batch_split import PartInfo
from tfdist.parameter_server.loss_normalizers import MicroStep
from tfdist.parameter_server.step_results import LogPart, combined_logs, log_part
from tfdist.parameter_server.worker_scope import PhaseEnded, StepUpdates, WorkerScope
from tfdist.tensorflow_internals.xla_functions import inlined, is_compiled


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the micro-steps of a worker have computed.

    Attributes:
        gradients: By optimizer, in the order in which the steps used them, and by variable: means over the samples.
        optimizers: The updates of these optimizers.
        changes: The servers' other variables that the steps would change, and by how much.
        metrics: What the steps have added to the variables of the metrics.
        logs: What the steps returned.
        samples: The number of samples, an int64 scalar.
        updates: The count of updates when the variables were pulled, an int64 scalar.
        bytes_pulled: Payload bytes of the pulled variables, an int64 scalar.
        num_normalizers: How many means in a step's losses divide by something other than the number of samples.
        is_last: Whether the steps were computed to their end, and not to that of an earlier phase.
    """

    gradients: list[list[Any]]
    optimizers: list[Any]
    changes: list[tuple[tf.Variable, tf.Tensor]]
    metrics: list[tf.Tensor]
    logs: LogPart
    samples: tf.Tensor
    updates: tf.Tensor
    bytes_pulled: tf.Tensor
    num_normalizers: int
    is_last: bool = True


def compute(
    model: keras.Model,
    batches: Sequence[Any],
    part: PartInfo,
    pull_dtype: tf.DType | None,
    total_samples: Callable[[tf.Tensor], tf.Tensor] | None,
    divided: DividedRows,
    updates: StepUpdates,
) -> StepResult:
    """Runs `model.train_step` on each of `batches`, one after another, and changes no variable itself.

    The batches are a part of a push or a round: inputs, targets, weights. `total_samples` returns the number of samples
    in all parts from that in these batches, both int64 scalars; `None`: they are one batch and the only part. `updates`
    makes the updates of all phases but the last one.
    """
    counter = update_counter(model.optimizer)
    count = tf.cast(counter.read_value(), tf.int64)
    train_step = inlined(model.train_step)
    jit_compile = is_compiled(model.train_step) or jit_compiles_on_workers(model)
    scope = WorkerScope(model.metrics_variables, part.number, pull_dtype, jit_compile=jit_compile, updates=updates)
    sizes = [tf.shape(first_input(batch), out_type=tf.int64)[0] for batch in batches]
    all_samples = sizes[0] if total_samples is None else total_samples(tf.add_n(sizes))
    of_outputs = means_of_outputs(model)
    loss_step = MicroStep()
    logs: list[LogPart] = []
    is_last = True
    before: list[tf.Tensor] = [count]
    for batch, size in zip(batches, sizes, strict=True):
        if total_samples is not None:
            loss_step = MicroStep(tf.math.divide_no_nan(*_floats(all_samples, size)), part.normalizers)
        static_size = first_input(batch).shape[0]
        loss_step.observe(batch, size if static_size is None else static_size)
        values = scope.mean_values(of_outputs)
        # One after another, so that the activations of a micro-step are freed before the next one.
        try:
            with tf.control_dependencies(before), divided.checked_literals() as traced, scope.step(loss_step):
                traced.append(loss_step)
                logs.append(log_part(model, train_step(batch), scope.first_metric_values, loss_step.mean_of))
        except PhaseEnded:
            is_last = False
        if of_outputs and is_last:
            scope.weigh_means(tf.math.divide_no_nan(*_floats(size, all_samples)), of_outputs, values)
        before = [values_of(gradient) for _, gradients in scope.pushed[-1] for gradient in gradients]
    with tf.control_dependencies(before):
        samples = tf.add_n(sizes)
    steps = scope.pushed
    means = [
        [_mean([step[position][1][index] for step in steps], sizes, samples) for index in range(len(gradients))]
        for position, (_, gradients) in enumerate(steps[0])
    ]
    return StepResult(
        means,
        [optimizer for optimizer, _ in steps[0]],
        scope.changes([counter], of_phase=not is_last),
        _metric_values(model, scope),
        combined_logs(logs, [size / samples for size in sizes]) if is_last else {},
        samples,
        count,
        tf.add_n([tf.constant(scope.bytes_pulled, tf.int64), *scope.rows_bytes_pulled]),
        loss_step.num_normalizers,
        is_last,
    )


def evaluate(model: keras.Model, batch: Any) -> tuple[list[tf.Tensor], LogPart]:
    """Runs `model.test_step`; returns what it adds to the variables of the metrics, and its logs."""
    jit_compile = is_compiled(model.test_step) or jit_compiles_on_workers(model)
    scope = WorkerScope(model.metrics_variables, tf.constant(0, tf.int64), None, jit_compile=jit_compile)
    of_outputs = means_of_outputs(model)
    values = scope.mean_values(of_outputs)
    with scope.step():
        logs = log_part(model, inlined(model.test_step)(batch), scope.first_metric_values, lambda value: value)
    scope.weigh_means(1.0, of_outputs, values)
    return _metric_values(model, scope), logs


def _metric_values(model: keras.Model, scope: WorkerScope) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(scope.get_current_value(variable)) for variable in model.metrics_variables]


def _floats(*numbers: tf.Tensor) -> list[tf.Tensor]:
    return [tf.cast(number, tf.float64) for number in numbers]


def _mean(gradients: Sequence[Any], sizes: Sequence[tf.Tensor], total: tf.Tensor) -> Any:
    """Returns the mean of micro-steps' gradients, weighted by their samples."""
    if len(gradients) == 1:
        return gradients[0]
    weights = [tf.cast(size / total, gradients[0].dtype) for size in sizes]
    if isinstance(gradients[0], tf.IndexedSlices):
        values = [gradient.values * weight for gradient, weight in zip(gradients, weights, strict=True)]
        indices = tf.concat([gradient.indices for gradient in gradients], 0)
        return tf.IndexedSlices(tf.concat(values, 0), indices, gradients[0].dense_shape)
    return tf.add_n([gradient * weight for gradient, weight in zip(gradients, weights, strict=True)])
