"""Runs the micro-batches of one column whose stages are each shared by several devices."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.batch_rows import MicroBatch
from tfdist.model_parallel.column_run import added, dense_of, received_inputs
from tfdist.model_parallel.layer_states import StageValues
from tfdist.model_parallel.pipeline_schedule import Task, execution_order
from tfdist.model_parallel.shard_program import ShardState
from tfdist.model_parallel.sharded_stage import ShardedStageFunction, differentiable_inputs
from tfdist.model_parallel.split_outputs import CHOICES, WHOLE
from tfdist.model_parallel.stage_functions import StageInputs, StageResult
from tfdist.model_parallel.step_functions import StepFunctions
from tfdist.model_parallel.transfers import ACTIVATION_GRADIENT, PREDICTION, record_transfer


class ShardRun:
    """What one device of each stage has computed; the attributes are those of `ColumnRun`."""

    def __init__(self, values: Sequence[StageValues]) -> None:
        self.results: dict[tuple[int, int], StageResult] = {}
        self.gradients: list[list[Any]] = [[None] * len(one.trainable) for one in values]
        self.data: list[Any] = []
        self.values = values
        self.sent: dict[tuple[int, int], tuple[tf.Tensor, Any]] = {}  # tensor and mask by tensor and micro-batch
        self.received: dict[tuple[int, int], list[Any]] = defaultdict(list)  # gradients by tensor and micro-batch
        self.last: list[list[tf.Operation]] = [[] for _ in values]  # of each stage, what its next task waits for


class ShardedColumnRun:
    """The forward and backward passes of a column's micro-batches. Device `r` of a stage sends to device `r` of others.

    Attributes:
        runs: By number of the device within its stage.
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
        """Prepares a run.

        Args:
            functions: Those of the stages.
            devices: By number of the device, then by stage.
            values: In the same order, the values of variables.
            micro_batches: Those of this column.
            loss_scale: As that of `ColumnRun`.
        """
        self.accuracies: list[Any] = []
        self.runs = [ShardRun(of_rank) for of_rank in values]
        self._functions, self._stages = functions, functions.stages
        self._devices, self._micro_batches, self._loss_scale = devices, micro_batches, loss_scale
        self._states: dict[tuple[int, int], tuple[ShardedStageFunction, ShardState]] = {}

    def run(self, orders: Sequence[Sequence[Task]], x: Sequence[tf.Tensor], data: Any) -> None:
        """Adds all passes to the graph; see `ColumnRun.run`."""
        for number, micro_batch in enumerate(self._micro_batches):
            rows = micro_batch.rows(list(x))
            of_data = None if data is None else micro_batch.rows(data)
            for run in self.runs:
                for symbolic, tensor in zip(self._stages.graph.inputs, rows, strict=True):
                    run.sent[id(symbolic), number] = tensor, None
                run.data.append(of_data)
        for task in execution_order(orders):
            if task.is_forward:
                self._forward(task)
            else:
                self._backward(task)

    def _of_stage(self, stage: int) -> list[str]:
        return [of_rank[stage] for of_rank in self._devices]

    def _forward(self, task: Task) -> None:
        index, number = task.stage, task.micro_batch
        stage, micro_batch, devices = (
            self._stages.stages[index],
            self._micro_batches[number],
            self._of_stage(task.stage),
        )
        arguments = []
        for run, device in zip(self.runs, devices, strict=True):
            with tf.device(device), tf.control_dependencies(run.last[index]):
                arguments.append(self._inputs(run, task, device))
        function, _ = self._functions.of(index, arguments[0])
        arguments = [self._functions.of(index, given)[1] for given in arguments]
        after = [run.last[index] for run in self.runs]
        results, state = function.program.forward(arguments, devices, after, micro_batch.num_rows)
        self._states[index, number] = function, state
        for run, result in zip(self.runs, results, strict=True):
            run.results[index, number] = result if run is not self.runs[0] else self._of_batch(function, task, results)
            run.values[index].update(function.changed, result.states, micro_batch)
            for symbolic, tensor, mask in zip(stage.outputs, result.tensors, result.masks, strict=True):
                run.sent[id(symbolic), number] = tensor, mask
            run.last[index] = [one.op for one in [*result.tensors, result.loss] if one is not None][:1]

    def _of_batch(self, function: ShardedStageFunction, task: Task, results: Sequence[StageResult]) -> StageResult:
        """Returns the result of the first device, whose outputs are those that metrics or the program take."""
        result, rows, device = results[0], self._micro_batches[task.micro_batch].num_rows, self._of_stage(task.stage)[0]
        outputs, choices = list(result.tensors), iter(result.choices)
        for position, output in function.split.items():
            shape = self._stages.stages[task.stage].outputs[position].shape
            parts = [one.tensors[position] for one in results]
            if not function.has_loss or output.metrics == WHOLE:
                record_transfer(PREDICTION, parts, device, rows=rows)
                with tf.device(device):
                    outputs[position] = tf.concat(parts, -1)[..., : shape[-1]]  # without padding
                outputs[position].set_shape([outputs[position].shape[0], *shape[1:]])
            elif output.metrics == CHOICES:
                outputs[position] = next(choices)
        if function.has_loss:
            chosen = [output for output in function.split.values() if output.metrics == CHOICES]
            self.accuracies = [metric for output in chosen for metric in output.accuracies]
        return result._replace(tensors=outputs)

    def _inputs(self, run: ShardRun, task: Task, device: str) -> StageInputs:
        index, number = task.stage, task.micro_batch
        stage, micro_batch = self._stages.stages[index], self._micro_batches[number]
        sent = [run.sent[id(symbolic), number] for symbolic in stage.inputs]
        data = run.data[number] if index == len(run.values) - 1 else None
        return received_inputs(self._stages, stage, run.values[index].current, sent, data, micro_batch, device)

    def _backward(self, task: Task) -> None:
        index, number = task.stage, task.micro_batch
        function, state = self._states.pop((index, number))
        devices = self._of_stage(index)
        seeds = []
        for run, device in zip(self.runs, devices, strict=True):
            with tf.device(device), tf.control_dependencies(run.last[index]):
                seeds.append(self._seeds(run, task, function, device))
        if not seeds[0]:
            return
        found = function.program.backward(state, seeds, [run.last[index] for run in self.runs])
        for run, device, gradients in zip(self.runs, devices, found, strict=True):
            if gradients:
                with tf.device(device):
                    self._take(run, task, gradients)

    def _seeds(self, run: ShardRun, task: Task, function: ShardedStageFunction, device: str) -> list[tf.Tensor]:
        """Returns the gradients of the targets of the stage on one device."""
        index, number = task.stage, task.micro_batch
        stage, result, given = self._stages.stages[index], run.results[index, number], []
        for position in function.targets:
            symbolic, tensor = stage.outputs[position], result.tensors[position]
            gradients = run.received.pop((id(symbolic), number), [])
            rows = self._micro_batches[number].num_rows if self._stages.has_samples(symbolic) else None
            record_transfer(ACTIVATION_GRADIENT, gradients, device, rows=rows)
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            given.append(tf.add_n(dense) if dense else tf.zeros_like(tensor))
        return given if result.loss is None else [*given, tf.identity(self._loss_scale)]

    def _take(self, run: ShardRun, task: Task, gradients: Sequence[Any]) -> None:
        index, number = task.stage, task.micro_batch
        stage, values = self._stages.stages[index], run.values[index]
        totals, weights = run.gradients[index], gradients[: len(values.trainable)]
        fixed = self._functions.fixed_tables(index)
        for place, (position, gradient) in enumerate(zip(values.trainable, weights, strict=True)):
            value = values.current[position]
            own = _sparse(gradient, value)
            if position in fixed:
                own = dense_of(own, value.shape)
            totals[place] = added(totals[place], own)
        tensors = [run.sent[id(symbolic), number][0] for symbolic in stage.inputs]
        inputs = [stage.inputs[position] for position in differentiable_inputs(self._stages, stage, tensors)]
        for symbolic, gradient in zip(inputs, gradients[len(values.trainable) :], strict=True):
            if gradient is not None:
                run.received[id(symbolic), number].append(gradient)
        done = [leaf for leaf in tf.nest.flatten(list(gradients)) if leaf is not None]
        run.last[index] = [leaf.op for leaf in done[:1]]


def _sparse(gradient: Any, value: tf.Tensor) -> Any:
    """Returns a gradient as the tape had it."""
    if not isinstance(gradient, tuple):
        return gradient
    return tf.IndexedSlices(*gradient, tf.constant(value.shape.as_list()))
