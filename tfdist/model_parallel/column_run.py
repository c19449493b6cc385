"""Runs the micro-batches of one column of stages in the order of the schedule."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.batch_rows import MicroBatch
from tfdist.model_parallel.layer_states import StageValues
from tfdist.model_parallel.pipeline_schedule import Task, execution_order
from tfdist.model_parallel.stage_functions import StageInputs, StageResult
from tfdist.model_parallel.stages import ModelStages, Stage
from tfdist.model_parallel.step_functions import StepFunctions
from tfdist.model_parallel.transfers import ACTIVATION, ACTIVATION_GRADIENT, BATCH, record_transfer


class ColumnRun:
    """The forward and backward passes of a column's micro-batches through its stages.

    Attributes:
        results: By stage and micro-batch, what the stage has returned.
        values: By stage, the values of its variables, and the states that layers have changed.
        gradients: By stage, the sums of the gradients of its trainable variables, or None.
        data: By micro-batch, its rows of inputs, targets and weights for the losses.
    """

    def __init__(
        self,
        functions: StepFunctions,
        devices: Sequence[str],
        values: Sequence[StageValues],
        micro_batches: Sequence[MicroBatch],
        loss_scale: tf.Tensor | None,
    ) -> None:
        """Prepares a run.

        Args:
            functions: Those of the stages.
            devices: By stage.
            values: By stage, the values of its variables.
            micro_batches: Those of this column.
            loss_scale: The gradient of the scaled loss with respect to the loss, a float32 scalar; None if nothing is
                differentiated.
        """
        self.results: dict[tuple[int, int], StageResult] = {}
        self.gradients: list[list[Any]] = [[None] * len(one.trainable) for one in values]
        self.data: list[Any] = []
        self._functions, self._stages = functions, functions.stages
        self._devices, self.values, self._micro_batches = devices, values, micro_batches
        self._loss_scale = loss_scale
        self._tapes: dict[tuple[int, int], tuple[tf.GradientTape, list[tf.Tensor], list[Any]]] = {}
        self._received: dict[tuple[int, int], list[Any]] = defaultdict(list)  # gradients by tensor and micro-batch
        self._sent: dict[tuple[int, int], tuple[tf.Tensor, Any]] = {}  # tensor and mask by tensor and micro-batch
        self._last: list[list[tf.Operation]] = [[] for _ in devices]  # of each stage, what its next task waits for

    def run(self, orders: Sequence[Sequence[Task]], x: Sequence[tf.Tensor], data: Any) -> None:
        """Adds all passes to the graph.

        Args:
            orders: By stage, its tasks in their order. Each task waits until the one before has ended.
            x: The inputs of the batch, as the model's graph has them.
            data: Inputs, targets and weights of the batch for the losses, or None.
        """
        for number, micro_batch in enumerate(self._micro_batches):
            for symbolic, tensor in zip(self._stages.graph.inputs, micro_batch.rows(list(x)), strict=True):
                self._sent[id(symbolic), number] = tensor, None
            # Here, so that each column receives its own rows only.
            self.data.append(None if data is None else micro_batch.rows(data))
        for task in execution_order(orders):
            with tf.device(self._devices[task.stage]), tf.control_dependencies(self._last[task.stage]):
                done = self._forward(task) if task.is_forward else self._backward(task)
            self._last[task.stage] = [tensor.op for tensor in done]

    def _forward(self, task: Task) -> list[tf.Tensor]:
        index, number = task.stage, task.micro_batch
        stage, values, micro_batch = self._stages.stages[index], self.values[index], self._micro_batches[number]
        sent = [self._sent[id(symbolic), number] for symbolic in stage.inputs]
        data = self.data[number] if index == len(self._devices) - 1 else None
        given = received_inputs(self._stages, stage, values.current, sent, data, micro_batch, self._devices[index])
        function, given = self._functions.of(index, given)
        inputs = [
            (symbolic, tensor)
            for symbolic, tensor in zip(stage.inputs, given.tensors, strict=True)
            if (tensor.dtype.is_floating or tensor.dtype.is_complex) and self._stages.maker(symbolic) >= 0
        ]
        sources = [*(given.values[position] for position in values.trainable), *(tensor for _, tensor in inputs)]
        tape = tf.GradientTape(watch_accessed_variables=False)
        with tape:
            if self._loss_scale is not None:
                tape.watch(sources)
            result = function(given)
        self.results[index, number] = result
        self._tapes[index, number] = tape, sources, [symbolic for symbolic, _ in inputs]
        values.update(function.changed, result.states, micro_batch)
        for symbolic, tensor, mask in zip(stage.outputs, result.tensors, result.masks, strict=True):
            self._sent[id(symbolic), number] = tensor, mask
        return [tensor for tensor in [*result.tensors, result.loss] if tensor is not None][:1]

    def _backward(self, task: Task) -> list[tf.Tensor]:
        index, number = task.stage, task.micro_batch
        stage, result = self._stages.stages[index], self.results[index, number]
        tape, sources, inputs = self._tapes.pop((index, number))
        targets, given = [], []
        for symbolic, tensor in zip(stage.outputs, result.tensors, strict=True):
            gradients = self._received.pop((id(symbolic), number), [])
            if gradients:
                rows = self._micro_batches[number].num_rows if self._stages.has_samples(symbolic) else None
                record_transfer(ACTIVATION_GRADIENT, gradients, self._devices[index], rows=rows)
                targets.append(tensor)
                given.append(tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients]))
        if result.loss is not None:
            targets.append(result.loss)
            given.append(tf.identity(self._loss_scale))
        if not targets or not sources:
            return [op.outputs[0] for op in self._last[index] if op.outputs]
        found = tape.gradient(targets, sources, given)
        weights = len(self.values[index].trainable)
        totals, trainable = self.gradients[index], self.values[index].trainable
        fixed = self._functions.fixed_tables(index)
        for position, (number_of_variable, gradient) in enumerate(zip(trainable, found[:weights], strict=True)):
            is_fixed = number_of_variable in fixed
            own = dense_of(gradient, stage.variables[number_of_variable].shape) if is_fixed else gradient
            totals[position] = added(totals[position], own)
        for symbolic, gradient in zip(inputs, found[weights:], strict=True):
            if gradient is not None:
                self._received[id(symbolic), number].append(gradient)
        done = [gradient for gradient in found if gradient is not None]
        return [getattr(gradient, "values", gradient) for gradient in done][:1]


def received_inputs(
    stages: ModelStages,
    stage: Stage,
    values: Sequence[tf.Tensor],
    sent: Sequence[tuple[tf.Tensor, Any]],
    data: Any,
    micro_batch: MicroBatch,
    device: str,
) -> StageInputs:
    """Records what a device receives for a micro-batch, and returns it.

    Args:
        stages: All stages.
        stage: That of the device.
        values: Of its variables.
        sent: For each of its inputs the tensor and its mask or None.
        data: Inputs, targets and weights for losses, or None.
        micro_batch: The micro-batch.
        device: The present one.
    """
    rows = micro_batch.num_rows
    for symbolic, (tensor, mask) in zip(stage.inputs, sent, strict=True):
        kind = BATCH if stages.maker(symbolic) < 0 else ACTIVATION
        record_transfer(kind, [tensor], device, rows=rows if stages.has_samples(symbolic) else None)
        record_transfer(kind, [mask], device, rows=rows)
    record_transfer(BATCH, tf.nest.flatten(data), device, rows=rows)
    return StageInputs(
        values=list(values),
        tensors=[tf.identity(tensor) for tensor, _ in sent],
        masks=[mask for _, mask in sent],
        data=data,
        fraction=micro_batch.fraction,
        is_real=micro_batch.is_real,
        divisors=tf.zeros([0]),
    )


def dense_of(gradient: Any, shape: Any) -> Any:
    """Returns the gradient of a table whose rows one process looks up once a batch, and each micro-batch again.

    Dense gradients are added row by row. Rows of `tf.IndexedSlices` would be squared separately.
    """
    if gradient is None:
        return None
    dense = tf.convert_to_tensor(gradient)
    dense.set_shape(shape)
    return dense


def added(total: Any, gradient: Any) -> Any:
    """Returns the sum of two gradients, dense or `tf.IndexedSlices`; None counts as zero."""
    if total is None or gradient is None:
        return gradient if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([total.values, gradient.values], 0),
            tf.concat([total.indices, gradient.indices], 0),
            total.dense_shape,
        )
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
