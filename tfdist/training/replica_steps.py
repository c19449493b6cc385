"""Runs a Keras step on every replica: shares the samples out, then shares the results."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.models import batch_statistics, computes_over_all_replicas, first_input, step_states
from tfdist.training.empty_batches import filled, kept_if
from tfdist.training.micro_batches import run_in_turns
from tfdist.training.rows import has_rows, is_distributed, rows_of_part
from tfdist.training.step import ReplicaStep, count_samples, static_samples, sum_over_replicas
from tfdist.training.synchronization import PartResult, synchronise


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
                if training and strategy.micro_batches > 1 and _can_be_cut(replica_data):
                    results = _in_micro_batches(model, step_function, replica_data, step, strategy)
                else:
                    results = [_at_once(model, step_function, replica_data, step)]
            return synchronise(model, step, results, training=training)

    return replica_step


def _at_once(model: Any, step_function: Callable[[Any], Any], data: Any, step: ReplicaStep) -> PartResult:
    if step.contributes is True or computes_over_all_replicas(model):
        logs = step_function(data)
    else:
        with kept_if(step.contributes, model.metrics_variables):
            logs = step_function(filled(data, step.samples))
    return PartResult(step, logs, [variable.value for variable in batch_statistics(model)])


def _in_micro_batches(
    model: Any, step_function: Callable[[Any], Any], data: Any, step: ReplicaStep, strategy: Any
) -> list[PartResult]:
    """Runs the step on parts of a replica's data, one after another, as so many replicas would."""
    count = strategy.micro_batches
    value = first_input(data)
    parts = [rows_of_part(data, value, part, count) for part in range(count)]
    steps = [step.part(_samples(first_input(part)), count) for part in parts]
    fills = not computes_over_all_replicas(model)
    statistics = batch_statistics(model)
    states = step_states(model)
    own = [_values(states) for _ in parts]
    is_there = 0

    @contextmanager
    def turn(part: int) -> Iterator[None]:
        """Each begins with the states that the step began with, and goes on with those that it has left."""
        nonlocal is_there
        if part != is_there:
            own[is_there] = _values(states)
            _assign(states, own[part], strategy)
            is_there = part
        contributes = steps[part].contributes
        with kept_if(contributes if fills else True, model.metrics_variables):
            yield

    def body(part: int) -> Any:
        with tf.control_dependencies(_tensors(parts[part])), steps[part].running():
            samples = steps[part].samples
            is_full = steps[part].contributes is True or not fills
            return step_function(parts[part] if is_full else filled(parts[part], samples))

    logs = run_in_turns([functools.partial(body, part) for part in range(count)], turn)
    own[is_there] = _values(states)
    _assign(states, [_of_replica(*values) for values in zip(states, *own, strict=True)], strategy)
    positions = [next(i for i, state in enumerate(states) if state is variable) for variable in statistics]
    return [
        PartResult(step, part_logs, [kept[position] for position in positions])
        for step, part_logs, kept in zip(steps, logs, own, strict=True)
    ]


def _of_replica(variable: Any, *of_parts: tf.Tensor) -> tf.Tensor:
    """What a replica keeps of what its micro-batches have made of a variable, as its aggregation says."""
    if variable.aggregation == "mean":
        return tf.cast(tf.add_n(of_parts) / tf.cast(len(of_parts), of_parts[0].dtype), of_parts[0].dtype)
    return of_parts[0] if variable.aggregation == "only_first_replica" else of_parts[-1]


def _assign(variables: Sequence[Any], values: Sequence[tf.Tensor], strategy: Any) -> None:
    """Assigns on this replica alone."""
    for variable, value in zip(variables, values, strict=True):
        strategy.extended.update(variable.value, _assign_one, args=(value,), group=False)


def _assign_one(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value)


def _values(variables: Sequence[Any]) -> list[tf.Tensor]:
    return [tf.identity(variable.value) for variable in variables]


def _samples(value: Any) -> int | tf.Tensor:
    static = static_samples(value)
    return count_samples(value) if static is None else static


def _can_be_cut(data: Any) -> bool:
    value = first_input(data)
    return value is not None and has_rows(value)


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
