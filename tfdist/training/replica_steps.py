"""Runs a Keras step on every replica: shares the samples out, then shares the results."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.models import computes_over_all_replicas, first_input
from tfdist.training.empty_batches import filled, kept_if
from tfdist.training.step import ReplicaStep, count_samples, static_samples, sum_over_replicas
from tfdist.training.synchronization import synchronise


def step_on_replicas(model: Any, step_function: Callable[[Any], Any], data: Any, strategy: Any) -> Callable[..., Any]:
    """Wraps `step_function`, a bound step of `model`, for `strategy.run(..., args=(data,))`.

    Args:
      model: a Keras model.
      step_function: its `train_step` or `test_step`.
      data: the batch, of which every replica gets its part.
      strategy: the strategy that will run the result.

    Returns:
      A function of a replica's data.
    """
    training = step_function.__name__ == "train_step"
    steps = iter(_static_steps(data, strategy))

    @tf.autograph.experimental.do_not_convert
    def replica_step(replica_data: Any) -> Any:
        # Replicas are traced, and eagerly run, one after another in their order.
        step = next(steps, None) or _dynamic_step(replica_data)
        # TensorFlow runs what does not depend on the data, the count of iterations among it, also in the step in which
        # the data turn out to be at their end.
        with step.running(), tf.control_dependencies(_tensors(replica_data)):
            if step.contributes is True or computes_over_all_replicas(model):
                logs = step_function(replica_data)
            else:
                with kept_if(step.contributes, model.metrics_variables):
                    logs = step_function(filled(replica_data, step.samples))
        return synchronise(model, step, logs, training=training)

    return replica_step


def _tensors(data: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(leaf)]


def _static_steps(data: Any, strategy: Any) -> Iterator[ReplicaStep]:
    """The local replicas' parts, if all replicas are local and their samples are known while tracing."""
    replicas = strategy.num_replicas_in_sync
    value = first_input(data)
    if value is None:
        yield from (ReplicaStep(1, 1 / replicas) for _ in range(replicas))
        return
    values = strategy.experimental_local_results(value)
    if len(values) == 1:  # not distributed: every replica gets the whole batch
        values = values * len(strategy.extended.worker_devices)
    samples = [static_samples(replica_value) for replica_value in values]
    counts = [count for count in samples if count]
    if len(counts) == len(samples) == replicas:
        yield from (ReplicaStep(count, count / sum(counts)) for count in counts)


def _dynamic_step(replica_data: Any) -> ReplicaStep:
    value = first_input(replica_data)
    samples = count_samples(value)
    total = sum_over_replicas(tf.cast(samples, tf.float32))
    fraction = tf.math.divide_no_nan(tf.cast(samples, tf.float32), total)
    static = static_samples(value)
    return ReplicaStep(samples if static is None else static, fraction)
