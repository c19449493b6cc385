"""Runs a Keras step on each replica: checks the model, splits the samples, runs the step, synchronizes the results.

At the end of the data, or if the last batch is smaller than the number of replicas, a replica has no samples. It must
take part in the collectives of its step. Many operations cannot compute without samples (with oneDNN, TensorFlow 2.21's
`Conv2D` returns a wrong shape), so it computes with a sample of another replica of its process, and its results are
discarded. If its process has no samples, it computes with one sample of zeros, where these may be an input
(`accepts_zeros`), and otherwise without samples.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.compiled_calls import jit_compiles
from tfdist.keras_internals.model_introspection import (
    accepts_zeros,
    added_losses,
    batch_statistics,
    computes_over_all_replicas,
    first_input,
    has_own_loss,
    is_made_under,
    predicting_model,
    set_added_losses,
    step_states,
)
from tfdist.keras_internals.model_state import is_on_replicas
from tfdist.losses.divided_rows import DividedRows
from tfdist.tensorflow_internals.merge_calls import sum_over_replicas
from tfdist.tensorflow_internals.rows_per_replica import RowsPerReplica, filled_samples, is_complete
from tfdist.tensorflow_internals.shared_operations import step_after
from tfdist.tensorflow_internals.xla_functions import inlined, is_compiled, workers_with_other_cpus
from tfdist.training.metric_synchronization import PartialResult, synchronize_results
from tfdist.training.micro_batches import run_micro_batches
from tfdist.training.sample_shares import (
    ReplicaStep,
    count_samples,
    has_rows,
    is_distributed,
    number_of_samples,
    rows_of_part,
    static_samples,
    tensors_in,
)
from tfdist.training.worker_batches import SharedRows, own_rows


def step_on_replicas(model: Any, step_function: Callable[[Any], Any], data: Any, strategy: Any) -> Callable[..., Any]:
    """Wraps `step_function`, a bound `train_step` or `test_step` of `model`, for `strategy.run(..., args=(data,))`."""
    is_compiled_by_user, step_function = is_compiled(step_function), inlined(step_function)
    training = step_function.__name__ == "train_step"
    is_within_worker = training and strategy.local_updates is not None
    shared = SharedRows(data, strategy, within_worker=is_within_worker) if is_complete(data) else None
    parts = _local_parts(data if shared is None else shared.own, strategy)
    fillers = parts if shared is None else [*parts, shared.whole]
    replicas = len(parts) if is_within_worker else strategy.num_replicas_in_sync
    carrier = first_input(data) if shared is None else None
    counted = carrier if isinstance(carrier, RowsPerReplica) else None
    inputs = [first_input(part) for part in parts]
    steps = iter(_static_steps(inputs, counted, replicas) if shared is None else shared.steps)
    micro_batches = strategy.micro_batches if training else 1
    counts = list(map(static_samples, inputs)) if shared is None else []
    divided = strategy.divided_rows = DividedRows.of(counts, strategy.num_replicas_in_sync, micro_batches)
    waiting = iter(enumerate(parts))

    @tf.autograph.experimental.do_not_convert
    def replica_step(_: Any) -> Any:
        replica, replica_data = next(waiting)
        # At the end of the data TensorFlow still runs the operations of a step that do not depend on the data, such as
        # the count of iterations and the keys of collectives.
        with step_after(tensors_in(replica_data)):
            # Replicas are traced, or run eagerly, one after another in their order.
            step = next(steps, None) or _dynamic_step(inputs, replica, replicas, counted, is_within_worker)
            if is_within_worker:
                step.stay_within_worker(len(parts))
            step.model, step.has_own_loss = model, has_own_loss(model)
            if not tf.executing_eagerly() and (is_compiled_by_user or jit_compiles(model, replica_data)):
                step.graph = tf.compat.v1.get_default_graph()
            if shared is not None and training and not is_within_worker:
                step.timing = shared.start_timing(model, replica_data, step)
            with step.running(), nullcontext() if step.timing is None else step.timing.computing():
                is_first = replica_data is parts[0]  # one replica stands for all
                with divided.checked_literals(is_first) as checked:
                    if micro_batches > 1 and has_rows(first_input(replica_data)):
                        results = _run_micro_batches(model, step_function, replica_data, step, strategy, fillers)
                    else:
                        results = [_run_whole_batch(model, step_function, replica_data, step, fillers)]
                    checked.append(results[0].step)
            guard = strategy.step_guard
            guarded: dict[str, Any] = {
                "guard": guard if guard is not None and guard.model is model else None,
                "is_first": is_first,
            }
            if shared is None or is_within_worker:  # the other workers compute by themselves, and report nothing
                return synchronize_results(model, step, results, training=training, **guarded)[0]
            shared.end_timing(model, step)
            logs, report = synchronize_results(
                model,
                step,
                results,
                training=training,
                report=shared.report(step),
                stored=strategy.metric_totals if is_first else None,
                **guarded,
            )
            shared.check(report)
            return logs, report

    return replica_step


def _run_whole_batch(
    model: Any, step_function: Callable[[Any], Any], data: Any, step: ReplicaStep, local: Sequence[Any]
) -> PartialResult:
    if step.contributes is True:
        step.observe(data, step.samples)
        logs = step_function(data)
    else:
        if step.may_lack_rows:
            data = filled_if_empty(data, step.samples, first_rows(local, or_zeros=accepts_zeros(model, data)))
        step.observe(data, step.number_of_samples)
        with revert_unless(step.contributes, _without_effect(model, step)):
            logs = step_function(data)
    return PartialResult(step, logs, [variable.value for variable in batch_statistics(model)])


def _run_micro_batches(
    model: Any, step_function: Callable[[Any], Any], data: Any, step: ReplicaStep, strategy: Any, local: Sequence[Any]
) -> list[PartialResult]:
    """Runs the step on parts of a replica's data, one after another, as that number of replicas would."""
    count = strategy.micro_batches
    value = first_input(data)
    parts = [rows_of_part(data, value, part, count) for part in range(count)]
    steps = [step.micro_batch(number_of_samples(first_input(part)), count) for part in parts]
    is_full = not any(part.may_lack_rows for part in steps)
    fillers = None if is_full else first_rows([*parts, *local], or_zeros=accepts_zeros(model, data))
    statistics = batch_statistics(model)
    states = step_states(model)
    own = [_values(states) for _ in parts]
    own_losses = [added_losses(model) for _ in parts]
    active = 0

    @contextmanager
    def turn(part: int) -> Iterator[None]:
        """Swaps states: each micro-batch begins with those of the step, and resumes with the states that it left."""
        nonlocal active
        if part != active:
            own[active], own_losses[active] = _values(states), added_losses(model)
            _assign(states, own[part], strategy)
            set_added_losses(own_losses[part])
            active = part
        with revert_unless(steps[part].contributes, _without_effect(model, step)):
            yield

    def body(part: int) -> Any:
        part_step, part_data = steps[part], parts[part]
        with step_after(tensors_in(part_data)), part_step.running():
            if not is_full and part_step.may_lack_rows:
                part_data = filled_if_empty(part_data, part_step.samples, fillers)
            part_step.observe(part_data, part_step.number_of_samples)
            return step_function(part_data)

    logs = run_micro_batches([functools.partial(body, part) for part in range(count)], turn)
    own[active] = _values(states)
    _assign(states, [_combined_state(*values) for values in zip(states, *own, strict=True)], strategy)
    positions = [next(i for i, state in enumerate(states) if state is variable) for variable in statistics]
    return [
        PartialResult(part_step, part_logs, [state_values[position] for position in positions])
        for part_step, part_logs, state_values in zip(steps, logs, own, strict=True)
    ]


def _without_effect(model: Any, step: ReplicaStep) -> list[Any]:
    """Returns the variables that a replica without samples must not change.

    An average over replicas gives the statistics of its batch the weight 0. If a worker trains by itself, it may have
    no samples at all, and then its replicas have equal weights.
    """
    return [*model.metrics_variables, *(batch_statistics(model) if step.is_within_worker else ())]


def _combined_state(variable: Any, *of_parts: tf.Tensor) -> tf.Tensor:
    """Combines the values of a variable after each micro-batch as its aggregation says."""
    if variable.aggregation == "mean":
        return tf.cast(tf.add_n(of_parts) / tf.cast(len(of_parts), of_parts[0].dtype), of_parts[0].dtype)
    return of_parts[0] if variable.aggregation == "only_first_replica" else of_parts[-1]


def _assign(variables: Sequence[Any], values: Sequence[tf.Tensor], strategy: Any) -> None:
    """Assigns `values` on this replica only."""
    for variable, value in zip(variables, values, strict=True):
        strategy.extended.update(variable.value, _assign_one, args=(value,), group=False)


def _assign_one(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value)


def _values(variables: Sequence[Any]) -> list[tf.Tensor]:
    return [tf.identity(variable.value) for variable in variables]


def predict_on_replicas(step_function: Any, data: Any, strategy: Any) -> Any:
    """Wraps Keras' prediction of a batch, for `strategy.run`, so that a replica without samples returns no rows."""
    parts = _local_parts(own_rows(data, strategy), strategy)
    or_zeros = accepts_zeros(predicting_model(step_function), parts[0])
    # The replicas are traced, or run eagerly, one after another. A replica without samples may have rows already.
    waiting = zip(parts, filled_samples(data) or [None] * len(parts), strict=True)

    @tf.autograph.experimental.do_not_convert
    def replica_predict(_: Any) -> Any:
        replica_data, own_samples = next(waiting)
        if own_samples is not None:
            return drop_rows_if_empty(step_function(replica_data), own_samples)
        value = first_input(replica_data)
        if value is None or (tf.is_tensor(value) and value.shape.rank and value.shape[0]):
            return step_function(replica_data)
        samples = count_samples(value)
        filled = filled_if_empty(replica_data, samples, first_rows(parts, or_zeros=or_zeros))
        return drop_rows_if_empty(step_function(filled), samples)

    return replica_predict


def _local_parts(data: Any, strategy: Any) -> list[Any]:
    """Returns the data of each local replica. Splits the rows if the data is not distributed yet."""
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


def _static_steps(inputs: list[Any], counted: RowsPerReplica | None, replicas: int) -> Iterator[ReplicaStep]:
    """Yields the local replicas' steps if the numbers of samples of all replicas are known while tracing."""
    if any(value is None for value in inputs):
        yield from (ReplicaStep(1, 1 / replicas) for _ in inputs)
        return
    counts = [count for count in map(static_samples, inputs) if count]
    if counted is not None:
        yield from (ReplicaStep(count, 1 / replicas) for count in counts if isinstance(counted.total, int))
    elif len(counts) == len(inputs) == replicas:
        yield from (ReplicaStep(count, count / sum(counts)) for count in counts)


def _dynamic_step(
    inputs: Sequence[Any], replica: int, replicas: int, counted: RowsPerReplica | None, is_within_worker: bool
) -> ReplicaStep:
    """Returns the step of a local replica with one of the `inputs`; `counted` may carry their numbers of samples."""
    value = inputs[replica]
    static, rows = static_samples(value), None
    if counted is None:
        samples = count_samples(value)
        if len(inputs) == replicas:
            total = tf.cast(tf.add_n([count_samples(replica_input) for replica_input in inputs]), tf.float32)
        else:
            (total,) = sum_over_replicas([tf.cast(samples, tf.float32)])
    else:
        samples = tf.cast(counted.samples[replica], tf.int32)
        total = tf.cast(tf.add_n(counted.samples) if is_within_worker else counted.total, tf.float32)
        if counted.is_filled:  # A replica without samples has rows, too, so `static` is not its number of samples.
            rows, static = static, None
        else:
            _check_rows(value, samples)
    step = ReplicaStep(
        samples if static is None else static,
        tf.math.divide_no_nan(tf.cast(samples, tf.float32), total),
        filled_rows=rows,
    )
    if is_within_worker:
        step.samples_of_worker = total
    return step


def _check_rows(value: Any, samples: tf.Tensor) -> None:
    tf.debugging.assert_equal(
        count_samples(value),
        samples,
        "The rows of a distributed batch have changed since it was drawn. Expected: as many rows as its iterator has "
        "counted, or a new distributed value. Received: other rows in the same value, as `tf.nest.map_structure` with "
        "`expand_composites=True` returns it. Change batches in a function that `strategy.run` calls, or in the "
        "dataset with `map`.",
    )


_log = logging.getLogger("tfdist")


def check_model(model: Any, strategy: Any, *, training: bool) -> None:
    """Raises an error if a step of `model` cannot run under `strategy`; warns if its replicas may diverge.

    Raises:
        ValueError: The model, its metrics or its optimizer were not created under the strategy's scope.
    """
    variables = [*model.variables, *model.metrics_variables]
    stray = next((variable for variable in variables if not is_on_replicas(variable)), None)
    if stray is not None:
        raise ValueError(
            "A variable was created outside the strategy's scope, so it is not on all replicas. "
            f"Received: {stray.path!r}, created outside {type(strategy).__name__}.scope(). Expected: the model, its "
            "metrics (also the ones given to `compile`), the optimizer and `model.compile` within one "
            "`with strategy.scope():` block. Move them there. What builds layers later, as `adapt` of a layer or a "
            "`fit` of the model's own, belongs there too."
        )
    if training and strategy.shards_weights and model.run_eagerly:
        raise ValueError(
            "With `shard_weights=True` steps are compiled: gradients of weights in parts are those of gathered ones. "
            "Received: a model that was compiled with `run_eagerly=True`. Expected: `run_eagerly=False`. Leave it out, "
            "or create the strategy with `shard_optimizer_state=True` alone."
        )
    optimizer = model.optimizer if training else None
    if optimizer is not None and not is_made_under(optimizer, strategy):
        raise ValueError(
            "The optimizer was created outside the strategy's scope, so its variables are not on all replicas. "
            f"Received: {type(optimizer).__name__} {optimizer.name!r}, created outside "
            f"{type(strategy).__name__}.scope(). Expected: the model, the optimizer and `model.compile` within one "
            "`with strategy.scope():` block. Move them there."
        )
    if training and strategy.local_updates is not None and computes_over_all_replicas(model):
        raise ValueError(
            "A layer normalizes over the samples of all replicas, and workers with local updates exchange nothing in a "
            "step. Received: a layer with `synchronized=True`. Expected: `BatchNormalization(synchronized=False)`, "
            "whose statistics are averaged when weights are exchanged, or `mode=Synchronous()`."
        )
    # "auto" leaves these workers without XLA.
    if training and model.jit_compile and strategy.rank == 0 and (workers := workers_with_other_cpus()):
        _warn_of_other_cpus(workers)


@functools.cache  # once
def _warn_of_other_cpus(workers: tuple[int, ...]) -> None:
    differ = f"worker {workers[0]}" if len(workers) == 1 else f"workers {', '.join(map(str, workers))}"
    _log.warning(
        "The weights of the workers may differ in the last bit: `jit_compile=True`, and XLA uses all instructions of "
        "each CPU. Received: %s with other CPU instructions than worker 0. Expected: equal ones on all workers. "
        "Compile with `model.compile(..., jit_compile=False)`, or use machines of one type.",
        differ,
    )


def filled_if_empty(data: Any, samples: Any, fillers: Any) -> Any:
    """Returns `data`, or a row of `fillers` (see `first_rows`) if there are no `samples`, an int or an int32 scalar.

    Ragged and sparse tensors are returned unchanged.
    """
    leaves, rows = tf.nest.flatten(data), tf.nest.flatten(fillers)
    dense = [position for position, leaf in enumerate(leaves) if tf.is_tensor(leaf) and _has_samples(leaf)]
    if not dense:
        return data
    chosen = tf.cond(
        tf.greater(samples, 0),
        lambda: [leaves[position] for position in dense],
        lambda: [rows[position] for position in dense],
    )
    for position, leaf in zip(dense, chosen, strict=True):
        leaves[position] = leaf
    return tf.nest.pack_sequence_as(data, leaves)


def first_rows(parts: Sequence[Any], *, or_zeros: bool) -> Any:
    """Returns the first row of several parts of a batch that has samples.

    If none has, the result is a row of zeros (`or_zeros`), or has no rows.
    """

    def first_row(*leaves: Any) -> Any:
        if not (tf.is_tensor(leaves[0]) and _has_samples(leaves[0])):
            return leaves[0]
        shape = leaves[0].shape[1:]
        if shape.is_fully_defined() and all(leaf.shape[1:] == shape for leaf in leaves):
            zeros = [tf.zeros([1, *shape], leaves[0].dtype)] if or_zeros else []
            return tf.concat([*(leaf[:1] for leaf in leaves), *zeros], axis=0)[:1]
        # Parts may be padded to different sizes.
        row = leaves[-1][:1]
        for leaf in reversed(leaves[:-1]):
            row = tf.cond(tf.greater(tf.shape(leaf)[0], 0), lambda leaf=leaf: leaf[:1], lambda row=row: row)
        if not or_zeros:
            return row
        return tf.cond(
            tf.greater(tf.shape(row)[0], 0),
            lambda: row,
            lambda: tf.zeros(tf.concat([[1], tf.shape(row)[1:]], axis=0), row.dtype),
        )

    return tf.nest.map_structure(first_row, *parts)


@contextmanager
def revert_unless(contributes: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Reverts what this replica assigns to `variables` in this context, unless it `contributes`."""
    if contributes is True:
        yield
        return
    before = [tf.identity(variable.value) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(contributes, tf.convert_to_tensor(variable.value), value))


def drop_rows_if_empty(outputs: Any, samples: Any) -> Any:
    """Returns `outputs`, or none of their rows if there are no samples and the data was filled."""

    def kept(output: Any) -> Any:
        if not (tf.is_tensor(output) and _has_samples(output)):
            return output
        return output[: tf.where(tf.greater(samples, 0), tf.shape(output)[0], 0)]

    return tf.nest.map_structure(kept, outputs)


def _has_samples(tensor: tf.Tensor) -> bool:
    return not isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)) and bool(tensor.shape.rank)
