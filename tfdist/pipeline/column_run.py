"""What the columns that share a copy of the model compute in a step: all micro-batches, in the order of the schedule.

Most states of layers are passed from micro-batch to micro-batch, such as the counts of random generators. Moving
statistics of batch normalization are computed by each micro-batch from those before the step, and averaged by samples,
as the replicas of a mirrored strategy do.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.gradient_tensors import added
from tfdist.keras_internals.placed_variables import held_variable
from tfdist.pipeline.pipeline import Task, execution_order
from tfdist.pipeline.stage_functions import StageFunction, StageInputs, StageResult, StepFunctions
from tfdist.pipeline.stages import ModelStages, Stage
from tfdist.pipeline.transfers import ACTIVATION, ACTIVATION_GRADIENT, BATCH, WEIGHT, record_transfer


@dataclass(frozen=True)
class MicroBatch:
    """Which rows of a batch a micro-batch has.

    Attributes:
        first: The first row on which it computes.
        end: The end of these rows.
        num_rows: How many rows these are.
        samples: How many of them are its samples: all or, if the batch has fewer rows than micro-batches, none. Then it
            computes on the first row of the batch, and its results do not count.
        fraction: Its samples divided by those of the batch, a float32 scalar.
        is_real: 1 if it has samples, otherwise 0; a float32 scalar.
    """

    first: Any
    end: Any
    num_rows: Any
    samples: Any
    fraction: tf.Tensor
    is_real: tf.Tensor

    def rows(self, data: Any) -> Any:
        """Returns the rows of each tensor in a structure."""
        return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[self.first : self.end], data)

    def results(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the rows of a result, of which a sample may have several; none if they do not count."""
        if isinstance(self.samples, int) and self.samples:
            return tensor
        return tensor[: tf.where(tf.equal(self.samples, 0), 0, tf.shape(tensor)[0])]


def are_even(parts: Sequence[MicroBatch]) -> bool:
    """Whether all micro-batches have the same number of samples, known while tracing."""
    return all(isinstance(part.samples, int) for part in parts)


def micro_batches_of(batch: Any, parts: int) -> list[MicroBatch]:
    """Splits the rows of a batch, a structure of tensors, into `parts` nearly equal parts, in order."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
            raise ValueError(
                f"A batch cannot be split into micro-batches. Received: {leaf!r} in a batch. Expected: dense tensors "
                "whose first axis holds the samples. Convert ragged and sparse tensors (`to_tensor`, "
                "`tf.sparse.to_dense`), and repeat a value that is the same for all samples."
            )
    static = {leaf.shape[0] for leaf in leaves if leaf.shape.rank is not None and leaf.shape[0] is not None}
    if len(static) > 1:
        raise ValueError(
            f"The tensors of a batch have different numbers of samples. Received: {sorted(static)}. Expected: the same "
            "number in inputs, targets and sample weights."
        )
    rows = next(iter(static)) if static else tf.shape(leaves[0])[0]
    if isinstance(rows, int) and rows % parts == 0 and rows:
        size, fraction = rows // parts, tf.constant(1 / parts, tf.float32)
        return [MicroBatch(m * size, m * size + size, size, size, fraction, tf.constant(1.0)) for m in range(parts)]
    rows = tf.convert_to_tensor(rows)
    return [_dynamic(rows, m, parts) for m in range(parts)]


def _dynamic(rows: tf.Tensor, number: int, parts: int) -> MicroBatch:
    first, end = rows * number // parts, rows * (number + 1) // parts
    samples = end - first
    is_empty = tf.equal(samples, 0)
    return MicroBatch(
        first=tf.where(is_empty, 0, first),
        end=tf.where(is_empty, 1, end),
        num_rows=tf.where(is_empty, 1, samples),
        samples=samples,
        fraction=tf.math.divide_no_nan(tf.cast(samples, tf.float32), tf.cast(rows, tf.float32)),
        is_real=tf.where(is_empty, 0.0, 1.0),
    )


_SEEDS_APART = 0x9E3779B1  # odd, so that products with small numbers differ


class StageValues:
    """The values of one stage's variables in one column.

    Attributes:
        current: Those for the next micro-batch, in the order of the stage's variables.
    """

    def __init__(self, stage: Stage, values: list[tf.Tensor], averaged: Collection[int]) -> None:
        """Starts with `values` before the step; moving statistics have the ids `averaged`."""
        self.current = values
        self._positions = {id(variable): i for i, variable in enumerate(stage.variables)}
        self._averaged = averaged
        self._sums: dict[int, tf.Tensor] = {}
        self._changed: set[int] = set()

    def update(self, changed: Sequence[keras.Variable], states: Sequence[tf.Tensor], part: MicroBatch) -> None:
        """Takes the states that a micro-batch leaves."""
        for variable, state in zip(changed, states, strict=True):
            key = id(variable)
            self._changed.add(key)
            if key in self._averaged:
                share = state * tf.cast(part.fraction, state.dtype)
                self._sums[key] = self._sums[key] + share if key in self._sums else share
            else:
                self.current[self._positions[key]] = state

    @property
    def states(self) -> dict[int, tf.Tensor]:
        """By the id of a variable, its state after the micro-batches; of a moving statistic this column's share."""
        return {
            key: self._sums[key] if key in self._sums else self.current[self._positions[key]] for key in self._changed
        }


def read_values(
    stages: ModelStages, stage: Stage, devices: Sequence[str], seeds: Collection[int], column: int
) -> list[tf.Tensor]:
    """Returns the values of a stage's variables on its device, each read once where it is.

    Stages that share a random generator, and columns, draw different numbers; `seeds` are ids of states of generators.
    """
    values = []
    for variable in stage.variables:
        held, owner = held_variable(variable), stages.owner[id(variable)]
        with tf.device(held.device):
            value = held.read_value()
        record_transfer(WEIGHT, [value], devices[stage.index])
        with tf.device(devices[stage.index]):
            value = tf.identity(value)
            stream = column * len(devices) + stage.index - owner
            if id(variable) in seeds and stream:
                value += tf.constant([stream * _SEEDS_APART % 2**32, 0], value.dtype)
        values.append(value)
    return values


def changed_states(
    stages: ModelStages, columns: Sequence[Sequence[StageValues]], seeds: Collection[int]
) -> dict[int, list[tf.Tensor]]:
    """Returns by the id of a variable the states of all columns that its owner leaves."""
    found: dict[int, list[tf.Tensor]] = {}
    for stage in stages.stages:
        of_columns = [values[stage.index].states for values in columns]
        for key in of_columns[0]:
            if stages.owner[key] == stage.index:
                found[key] = [states[key] for states in of_columns]
            elif key not in seeds:
                name = next(variable.path for variable in stage.variables if id(variable) == key)
                raise ValueError(
                    f"Two stages change the same variable. Received: {name!r}, changed by the stages "
                    f"{stages.owner[key]} and {stage.index}. Expected: all calls of a layer with such a state in one "
                    "stage. Choose other `cuts`, or use a separate layer in each stage."
                )
    return found


def combined_state(
    variable: keras.Variable, of_columns: list[tf.Tensor], before: tf.Tensor, *, is_average: bool
) -> Any:
    """Returns the state of a variable in all columns after a step; of an average, each column has its share."""
    if len(of_columns) == 1:
        return of_columns[0]
    if is_average or variable.aggregation in ("sum", "mean"):
        record_transfer(WEIGHT, of_columns, before.device)
    if is_average:
        return tf.add_n(of_columns)
    if variable.aggregation == "sum":
        return before + tf.add_n([state - before for state in of_columns])
    if variable.aggregation == "mean":
        return tf.cast(tf.add_n(of_columns) / len(of_columns), before.dtype)
    return of_columns[0]


class ColumnRun:
    """What one column has computed, with one device of each stage.

    Attributes:
        results: By stage and micro-batch, what the stage has returned.
        values: By stage, the values of its variables, and the states that layers have changed.
        gradients: By stage and position of a trainable variable, the sum of its gradients, or None.
        data: By micro-batch, its rows of inputs, targets and weights for the losses.
    """

    def __init__(self, values: Sequence[StageValues]) -> None:
        self.results: dict[tuple[int, int], StageResult] = {}
        self.gradients: list[dict[int, Any]] = [{} for _ in values]
        self.data: list[Any] = []
        self.values = values
        self.sent: dict[tuple[int, int], tuple[tf.Tensor, Any]] = {}  # tensor and mask by tensor and micro-batch
        self.received: dict[tuple[int, int], list[Any]] = defaultdict(list)  # gradients by tensor and micro-batch
        self.last: list[list[tf.Operation]] = [[] for _ in values]  # of each stage, what its next task waits for


class CopyRun:
    """The forward and backward passes of a copy of the model. Column `r` of a stage sends to column `r` of others.

    Attributes:
        columns: What each column has computed; the outputs of the first one are those that metrics or the program take.
        accuracies: Metrics that take `StageResult.choices` as outputs.
    """

    def __init__(
        self,
        functions: StepFunctions,
        devices: Sequence[Sequence[str]],
        values: Sequence[Sequence[StageValues]],
        micro_batches: Sequence[MicroBatch],
        loss_scale: tf.Tensor | None,
    ) -> None:
        """Prepares a run; `devices` and `values` of variables are by column and stage.

        The `loss_scale` is the gradient of the scaled loss with respect to the loss, a float32 scalar; None if nothing
        is differentiated.
        """
        self.columns = [ColumnRun(of_column) for of_column in values]
        self.accuracies: Sequence[Any] = ()
        self._functions, self._stages = functions, functions.stages
        self._devices, self._micro_batches, self._loss_scale = devices, micro_batches, loss_scale
        self._passes: dict[tuple[int, int], tuple[StageFunction, Any]] = {}  # what the backward pass needs

    def run(self, orders: Sequence[Sequence[Task]], x: Sequence[tf.Tensor], data: Any) -> None:
        """Adds all passes to the graph. Each task of a stage in `orders` waits until the one before has ended.

        `x` are the inputs of the batch, as the model's graph has them, `data` inputs, targets and weights for losses,
        or None.
        """
        for number, micro_batch in enumerate(self._micro_batches):
            rows = micro_batch.rows(list(x))
            # Here, so that each copy receives its own rows only.
            of_losses = None if data is None else micro_batch.rows(data)
            for column in self.columns:
                for symbolic, tensor in zip(self._stages.graph.inputs, rows, strict=True):
                    column.sent[id(symbolic), number] = tensor, None
                column.data.append(of_losses)
        for task in execution_order(orders):
            if task.is_forward:
                self._forward(task)
            else:
                self._backward(task)

    def _of_stage(self, stage: int) -> list[str]:
        return [of_column[stage] for of_column in self._devices]

    def _forward(self, task: Task) -> None:
        index, number = task.stage, task.micro_batch
        micro_batch, devices = self._micro_batches[number], self._of_stage(index)
        arguments = []
        for column, device in zip(self.columns, devices, strict=True):
            with tf.device(device), tf.control_dependencies(column.last[index]):
                arguments.append(self._inputs(column, task, device))
        function, _ = self._functions.of(index, arguments[0])
        arguments = [self._functions.of(index, inputs)[1] for inputs in arguments]
        after = [column.last[index] for column in self.columns]
        results, to_differentiate = function.forward(arguments, devices, after, micro_batch.num_rows)
        self._passes[index, number] = function, to_differentiate
        complete = function.complete_result(results, devices[0], micro_batch.num_rows)
        # What is gathered for metrics is not waited for, nor sent.
        for column, device, result, of_metrics in zip(
            self.columns, devices, results, [complete, *results[1:]], strict=True
        ):
            column.results[index, number] = of_metrics
            with tf.device(device):
                column.values[index].update(function.changed, result.states, micro_batch)
            for symbolic, tensor, mask in zip(function.stage.outputs, result.tensors, result.masks, strict=True):
                column.sent[id(symbolic), number] = tensor, mask
            column.last[index] = [tensor.op for tensor in [*result.tensors, result.loss] if tensor is not None][:1]
        if index == len(self._stages.stages) - 1:
            self.accuracies = function.accuracies

    def _inputs(self, column: ColumnRun, task: Task, device: str) -> StageInputs:
        """Records what a device receives for a micro-batch, and returns it."""
        index, number = task.stage, task.micro_batch
        stage, micro_batch = self._stages.stages[index], self._micro_batches[number]
        sent = [column.sent[id(symbolic), number] for symbolic in stage.inputs]
        data = column.data[number] if index == len(self._stages.stages) - 1 else None
        rows = micro_batch.num_rows
        for symbolic, (tensor, mask) in zip(stage.inputs, sent, strict=True):
            kind = BATCH if self._stages.maker(symbolic) < 0 else ACTIVATION
            record_transfer(kind, [tensor], device, rows=rows if self._stages.has_samples(symbolic) else None)
            record_transfer(kind, [mask], device, rows=rows)
        record_transfer(BATCH, tf.nest.flatten(data), device, rows=rows)
        return StageInputs(
            values=list(column.values[index].current),
            tensors=[tf.identity(tensor) for tensor, _ in sent],
            masks=[mask for _, mask in sent],
            data=data,
            fraction=micro_batch.fraction,
            is_real=micro_batch.is_real,
            divisors=tf.zeros([0]),
        )

    def _backward(self, task: Task) -> None:
        index, devices = task.stage, self._of_stage(task.stage)
        function, to_differentiate = self._passes.pop((index, task.micro_batch))
        seeds = []
        for column, device in zip(self.columns, devices, strict=True):
            with tf.device(device), tf.control_dependencies(column.last[index]):
                seeds.append(self._seeds(column, task, device))
        gradients = function.backward(to_differentiate, seeds, [column.last[index] for column in self.columns])
        for column, device, of_column in zip(self.columns, devices, gradients, strict=True):
            if of_column:
                with tf.device(device):
                    self._add(column, task, function, of_column)

    def _seeds(self, column: ColumnRun, task: Task, device: str) -> list[Any]:
        """Returns the gradients of the outputs of a stage and of its loss; None without one."""
        index, number = task.stage, task.micro_batch
        seeds: list[Any] = []
        for symbolic in self._stages.stages[index].outputs:
            gradients = column.received.pop((id(symbolic), number), [])
            rows = self._micro_batches[number].num_rows if self._stages.has_samples(symbolic) else None
            record_transfer(ACTIVATION_GRADIENT, gradients, device, rows=rows)
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            seeds.append(tf.add_n(dense) if dense else None)
        has_loss = column.results[index, number].loss is not None
        return [*seeds, tf.identity(self._loss_scale) if has_loss else None]

    def _add(self, column: ColumnRun, task: Task, function: StageFunction, gradients: Sequence[Any]) -> None:
        """Adds the gradients of weights to those of earlier micro-batches, and sends the others to earlier stages."""
        index, num_weights = task.stage, len(function.weights)
        totals = column.gradients[index]
        for position, gradient in zip(function.weights, gradients[:num_weights], strict=True):
            if position in function.fixed_tables and gradient is not None:
                # One process looks up these rows once a batch, and each micro-batch again. Dense gradients are added
                # row by row; rows of `tf.IndexedSlices` would be squared separately.
                gradient = tf.convert_to_tensor(gradient)
                gradient.set_shape(column.values[index].current[position].shape)
            totals[position] = added(totals.get(position), gradient)
        for position, gradient in zip(function.inputs, gradients[num_weights:], strict=True):
            if gradient is not None:
                column.received[id(function.stage.inputs[position]), task.micro_batch].append(gradient)
        present = [gradient for gradient in gradients if gradient is not None]
        column.last[index] = [getattr(gradient, "values", gradient).op for gradient in present[:1]]
