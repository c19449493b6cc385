"""What a worker computes of the batches that it is given."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.gradients import values_of
from tfdist.keras_internals.losses import means_of_outputs
from tfdist.keras_internals.models import first_input
from tfdist.keras_internals.scheduled_training import count_of_updates
from tfdist.parameter_server.loss_step import MicroStep
from tfdist.parameter_server.place import Place
from tfdist.parameter_server.worker_scope import WorkerScope


@dataclasses.dataclass(frozen=True)
class Computed:
    """What the micro-steps of a worker have computed.

    Attributes:
      gradients: by optimizer, in the order in which the steps used them, and by variable: the mean over the samples.
      optimizers: these optimizers' updates.
      changes: variables of the servers, and by how much the steps would change them.
      metrics: what the steps have added to the variables of the metrics.
      logs: what the last step returned.
      samples: how many samples there were, an int64 scalar.
      updates: the count of updates when the variables were pulled, an int64 scalar.
      bytes_pulled: an int64 scalar.
      own_divisors: how many means of a step divide by something else than the number of samples.
    """

    gradients: list[list[Any]]
    optimizers: list[Any]
    changes: list[tuple[tf.Variable, tf.Tensor]]
    metrics: list[tf.Tensor]
    logs: dict[str, Any]
    samples: tf.Tensor
    updates: tf.Tensor
    bytes_pulled: tf.Tensor
    own_divisors: int


def compute(
    model: keras.Model,
    batches: Sequence[Any],
    place: Place,
    pull_dtype: tf.DType | None,
    whole: Callable[[tf.Tensor], tf.Tensor] | None,
) -> Computed:
    """Runs `model.train_step` on each of `batches`, one after another, and changes nothing.

    Args:
      model: compiled and built.
      batches: of micro-steps: inputs, targets, weights, as `train_step` takes them.
      place: where these stand in what is trained on at once.
      pull_dtype: as which trainable variables cross the network.
      whole: given the number of these samples, the number of all that are trained on at once, both int64 scalars;
        `None`: `batches` is one batch, and all.
    """
    count = count_of_updates(model.optimizer)
    updates = tf.cast(count.read_value(), tf.int64)
    scope = WorkerScope(model.metrics_variables, place.number, pull_dtype)
    sizes = [tf.shape(first_input(batch), out_type=tf.int64)[0] for batch in batches]
    all_samples = sizes[0] if whole is None else whole(tf.add_n(sizes))
    of_outputs = means_of_outputs(model)
    loss_step = MicroStep()
    logs: Any = {}
    before: list[tf.Tensor] = [updates]
    for batch, size in zip(batches, sizes, strict=True):
        if whole is not None:
            loss_step = MicroStep(tf.math.divide_no_nan(*_floats(all_samples, size)), place.divisors)
        values = scope.values_of(of_outputs)
        # One after another, so that the activations of one are free before the next.
        with tf.control_dependencies(before), scope.step(loss_step):
            logs = model.train_step(batch)
        if of_outputs:
            scope.count_as(tf.math.divide_no_nan(*_floats(size, all_samples)), of_outputs, values)
        before = [values_of(gradient) for _, gradients in scope.pushed[-1] for gradient in gradients]
    with tf.control_dependencies(before):
        samples = tf.add_n(sizes)
    steps = scope.pushed
    means = [
        [_mean([step[position][1][index] for step in steps], sizes, samples) for index in range(len(gradients))]
        for position, (_, gradients) in enumerate(steps[0])
    ]
    return Computed(
        means,
        [optimizer for optimizer, _ in steps[0]],
        scope.changes(aside=[count]),
        [tf.convert_to_tensor(scope.get_current_value(variable)) for variable in model.metrics_variables],
        logs if isinstance(logs, dict) else {},
        samples,
        updates,
        tf.add_n([tf.constant(scope.bytes_pulled, tf.int64), *scope.rows_bytes_pulled]),
        loss_step.own_divisors,
    )


def _floats(*numbers: tf.Tensor) -> list[tf.Tensor]:
    return [tf.cast(number, tf.float64) for number in numbers]


def _mean(gradients: Sequence[Any], sizes: Sequence[tf.Tensor], total: tf.Tensor) -> Any:
    """The mean of micro-steps' gradients, each weighed by its samples."""
    if len(gradients) == 1:
        return gradients[0]
    shares = [tf.cast(size / total, gradients[0].dtype) for size in sizes]
    if isinstance(gradients[0], tf.IndexedSlices):
        values = [gradient.values * share for gradient, share in zip(gradients, shares, strict=True)]
        indices = tf.concat([gradient.indices for gradient in gradients], 0)
        return tf.IndexedSlices(tf.concat(values, 0), indices, gradients[0].dense_shape)
    return tf.add_n([gradient * share for gradient, share in zip(gradients, shares, strict=True)])


def evaluate(model: keras.Model, batch: Any) -> tuple[list[tf.Tensor], dict[str, Any]]:
    """Runs `model.test_step` and returns what it adds to the variables of the metrics, and its logs."""
    scope = WorkerScope(model.metrics_variables, tf.constant(0, tf.int64), None)
    of_outputs = means_of_outputs(model)
    values = scope.values_of(of_outputs)
    with scope.step():
        logs = model.test_step(batch)
    scope.count_as(1.0, of_outputs, values)
    found = [tf.convert_to_tensor(scope.get_current_value(variable)) for variable in model.metrics_variables]
    return found, logs if isinstance(logs, dict) else {}
