"""Runs a Keras step on every replica: shares the samples out, then shares the results."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.models import computes_over_all_replicas, first_input
from tfdist.training.empty_batches import filled, kept_if
from tfdist.training.rows import is_distributed, rows_of_part
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
    parts = _local_parts(data, strategy)
    steps = iter(_static_steps([first_input(part) for part in parts], strategy.num_replicas_in_sync))
    waiting = iter(parts)

    @tf.autograph.experimental.do_not_convert
    def replica_step(_: Any) -> Any:
        replica_data = next(waiting)
        # TensorFlow runs what does not depend on the data, such as the count of iterations and the keys of collectives,
        # also in the step in which the data turn out to be at their end.
        with tf.control_dependencies(_tensors(replica_data)):
            # Replicas are traced, and eagerly run, one after another in their order.
            step = next(steps, None) or _dynamic_step(replica_data)
            with step.running():
                if step.contributes is True or computes_over_all_replicas(model):
                    logs = step_function(replica_data)
                else:
                    with kept_if(step.contributes, model.metrics_variables):
                        logs = step_function(filled(replica_data, step.samples))
            return synchronise(model, step, logs, training=training)

    return replica_step


def _tensors(data: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(leaf)]


def _local_parts(data: Any, strategy: Any) -> list[Any]:
    """The data of each local replica; rows that no one has distributed are shared out among them."""
    replicas = len(strategy.extended.worker_devices)
    value = first_input(data)
    if not is_distributed(data) and value is not None and _is_dense(value):
        return [rows_of_part(data, value, part, replicas) for part in range(replicas)]
    leaves = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(data)]
    return [
        tf.nest.pack_sequence_as(data, [leaf[replica] if len(leaf) > 1 else leaf[0] for leaf in leaves])
        for replica in range(replicas)
    ]


def _is_dense(value: Any) -> bool:
    return not isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) and bool(len(value.shape))


def _static_steps(inputs: list[Any], replicas: int) -> Iterator[ReplicaStep]:
    """The local replicas' parts, if all replicas are local and their samples are known while tracing."""
    if any(value is None for value in inputs):
        yield from (ReplicaStep(1, 1 / replicas) for _ in inputs)
        return
    counts = [count for count in map(static_samples, inputs) if count]
    if len(counts) == len(inputs) == replicas:
        yield from (ReplicaStep(count, count / sum(counts)) for count in counts)


def _dynamic_step(replica_data: Any) -> ReplicaStep:
    value = first_input(replica_data)
    samples = count_samples(value)
    total = sum_over_replicas(tf.cast(samples, tf.float32))
    fraction = tf.math.divide_no_nan(tf.cast(samples, tf.float32), total)
    static = static_samples(value)
    return ReplicaStep(samples if static is None else static, fraction)
