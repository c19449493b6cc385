"""One step of a model in stages: a batch in micro-batches, their results and gradients, losses of regularizers."""

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.gradient_tensors import added
from tfdist.keras_internals.compiled_calls import rejects_xla
from tfdist.keras_internals.compiled_loss import accuracies_of_choices, overrides_compute_loss, update_loss_metrics
from tfdist.keras_internals.keras_symbols import set_mask
from tfdist.keras_internals.model_introspection import batch_statistics, seed_states
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.placed_variables import held_variable
from tfdist.pipeline.column_reduction import ColumnGradient, ColumnReduction
from tfdist.pipeline.column_run import (
    ColumnRun,
    CopyRun,
    StageValues,
    are_even,
    changed_states,
    combined_state,
    micro_batches_of,
    read_values,
)
from tfdist.pipeline.columns import Columns
from tfdist.pipeline.pipeline import Pipeline, tasks_of_stage
from tfdist.pipeline.stage_functions import StageKind, StepFunctions
from tfdist.pipeline.stages import ModelStages
from tfdist.pipeline.transfers import (
    BATCH,
    PREDICTION,
    WEIGHT,
    WEIGHT_GRADIENT,
    LinkCounters,
    Transfers,
    record_transfer,
)
from tfdist.pipeline.update import loss_scale_of, unscaling_of, update_columns, updates_weights
from tfdist.tensorflow_internals.operation_order import independent_calls


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineStep:
    """The steps of a placed model, with batches on the chief. Call its methods while a function is traced."""

    model: Any
    stages: ModelStages
    columns: Columns
    pipeline: Pipeline
    chief: str
    reduction: ColumnReduction
    counters: LinkCounters

    def train(self, data: Any) -> Any:
        """Computes the gradients of a batch, updates the model, and returns the logs, as `Model.train_step` does."""
        if not self.model.trainable_variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)  # as Keras does
            return self._evaluated(data, "train_step", training=True)
        optimizer, sent = self.model.optimizer, Transfers(self.chief)
        updates = updates_weights(optimizer)
        with sent.recording():
            batch = _Batch(self, data, StageKind(training=True, has_loss=True))
            batch.run(loss_scale_of(optimizer))
            gradients = gradients_of(self.model, self.stages, self.columns, batch.runs)
            penalties, of_weights = self._regularization()
            batch.assign_states()

            def update(sums: list[list[Any]]) -> None:
                of_columns = by_column(sums, self.columns)
                for of_column, of_regularizers in zip(of_columns, of_weights, strict=True):
                    for index, gradient in of_regularizers:
                        with tf.device(gradient.device):
                            of_column[index] = added(of_column[index], gradient)
                variables, may_compile = self.model.trainable_variables, not rejects_xla(self.model)
                update_columns(optimizer, variables, of_columns, self.columns, compiles_large=may_compile)

            with self.columns.updating():
                self.reduction(gradients, update)
            logs = batch.logs(penalties)
        self.counters.add("train_step", sent.total(), updates)
        return logs

    def test(self, data: Any) -> Any:
        """Computes the loss and the metrics of a batch, as `Model.test_step` does."""
        return self._evaluated(data, "test_step", training=False)

    def _evaluated(self, data: Any, name: str, *, training: bool) -> Any:
        sent = Transfers(self.chief)
        with sent.recording():
            batch = _Batch(self, data, StageKind(training=training, has_loss=True))
            batch.run(None)
            batch.assign_states()
            penalties = [loss for _, loss, _ in regularization_losses(self.model.trainable_variables, None)]
            logs = batch.logs(penalties)
        self.counters.add(name, sent.total())
        return logs

    def predict(self, data: Any) -> Any:
        """Returns the outputs for a batch, as `Model.predict_step` does."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        sent = Transfers(self.chief)
        with sent.recording():
            batch = _Batch(self, (x,), StageKind(training=False, has_loss=False))
            batch.run(None)
            batch.assign_states()
            outputs = batch.predictions()
        self.counters.add("predict_step", sent.total())
        return outputs

    def _regularization(self) -> tuple[list[tf.Tensor], list[list[tuple[int, Any]]]]:
        """Returns the losses of weights, and by column the indices of regularized variables and the gradients."""
        variables, penalties = self.model.trainable_variables, []
        of_columns: list[list[tuple[int, Any]]] = []
        for column in range(len(self.columns)):
            with self.columns.entered(column):
                losses = list(regularization_losses(variables, tf.ones([])))
            is_part = [id(variables[index]) in self.columns.axes for index, _, _ in losses]
            known = [column == 0 or (column < self.columns.ways and part) for part in is_part]
            penalties += [loss for (_, loss, _), counts in zip(losses, known, strict=True) if counts]
            of_columns.append([(index, gradient) for index, _, gradient in losses if gradient is not None])
        return penalties, of_columns


class _Batch:
    """One batch on its way through all columns."""

    def __init__(self, step: PipelineStep, data: Any, kind: StageKind) -> None:
        model, self._stages, self._columns = step.model, step.stages, step.columns
        self._model, self._pipeline, self._chief = model, step.pipeline, step.chief
        self.devices = step.columns.devices
        self.x, self.y, self.sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._inputs = self._stages.graph.flat_inputs(self.x)
        own_loss = kind.has_loss and overrides_compute_loss(model)
        self._data = (self.x if own_loss else None, self.y, self.sample_weight) if kind.has_loss else None
        self._ways = step.columns.ways
        parts = step.pipeline.micro_batches * (len(self.devices) // self._ways)
        self._parts = micro_batches_of([self._inputs, self._data], parts)
        self._kind = dataclasses.replace(kind, is_even=are_even(self._parts))
        self._seeds = seed_states(model)
        self._averaged = {id(variable) for variable in batch_statistics(model)} if kind.training else set()
        self.runs: list[ColumnRun] = []
        self._accuracies: Sequence[Any] = ()
        self._joined: list[tuple[str, tf.Tensor, Sequence[tf.Tensor]]] = []

    def run(self, loss_scale: tf.Tensor | None) -> None:
        """Adds the forward and, with a `loss_scale`, the backward passes of all micro-batches."""
        batch = (self._inputs, self._data)
        trace = self._columns.stage_function
        functions = StepFunctions(self._model, self._stages, self._kind, batch, self._chief, trace)
        pipeline, count = self._pipeline, len(self._stages.stages)
        orders = [
            tasks_of_stage(pipeline.schedule, index, count, pipeline.micro_batches, training=loss_scale is not None)
            for index in range(count)
        ]
        for group in range(len(self.devices) // self._ways):
            columns = range(group * self._ways, (group + 1) * self._ways)
            values = [self._values(column, group) for column in columns]
            first = group * pipeline.micro_batches
            parts = self._parts[first : first + pipeline.micro_batches]
            devices = [self.devices[column] for column in columns]
            run = CopyRun(functions, devices, values, parts, loss_scale)
            with independent_calls():
                run.run(orders, self._inputs, self._data)
            self.runs += run.columns
            self._accuracies = run.accuracies
        regularized = any(getattr(variable, "regularizer", None) for variable in self._model.trainable_variables)
        results = [result for run in self.runs for result in run.results.values()]
        if self._kind.has_loss and not regularized and all(result.loss is None for result in results):
            raise ValueError(
                "A step in stages has no loss. Received: loss=None in `compile`, and layers without losses. Expected: "
                "a `loss` in `compile`, a layer with `add_loss`, or a regularizer."
            )

    def _values(self, column: int, group: int) -> list[StageValues]:
        """Returns the values of the variables of a column by stage."""
        devices, stages = self.devices[column], self._stages
        with self._columns.entered(column):
            values = [read_values(stages, stage, devices, self._seeds, group) for stage in stages.stages]
        return [StageValues(*pair, self._averaged) for pair in zip(stages.stages, values, strict=True)]

    @property
    def _whole_runs(self) -> list[ColumnRun]:
        """Of each group of columns that share a copy of the model, the first one's run."""
        return self.runs[:: self._ways]

    def assign_states(self) -> None:
        """Assigns what layers have changed in a step, such as moving statistics and the counts of generators."""
        of_columns = [run.values for run in self._whole_runs]
        states = changed_states(self._stages, of_columns, self._seeds)
        variables = {id(variable): variable for variable in self._stages.variables}
        with self._columns.updating():
            for key, values in states.items():
                variable, before = variables[key], held_variable(variables[key])
                with tf.device(before.device):
                    new = combined_state(variable, values, before.read_value(), is_average=key in self._averaged)
                for held in before.in_columns:
                    record_transfer(WEIGHT, [new], held.device)
                    with tf.device(held.device):
                        held.assign(tf.cast(new, held.dtype))

    def predictions(self) -> Any:
        """Returns the outputs of the model for the batch, which its caller receives."""
        outputs = self._outputs()
        flat = tf.nest.flatten(outputs)
        self._record_joined(flat)
        record_transfer(PREDICTION, flat, self._chief, rows=tf.shape(self._inputs[0])[0])
        return outputs

    def _outputs(self) -> Any:
        """Returns the outputs of the model for the batch, on the device of the last stage, with their masks."""
        return self._stages.graph.packed_outputs([self._output(symbolic) for symbolic in self._stages.graph.outputs])

    def _output(self, symbolic: Any) -> tf.Tensor:
        index = self._stages.maker(symbolic)
        if index < 0:
            inputs = zip(self._stages.graph.inputs, self._inputs, strict=True)
            return next(tensor for of_model, tensor in inputs if of_model is symbolic)
        if not self._stages.has_samples(symbolic):
            raise ValueError(
                f"An output of a model in stages has no axis of samples. Received: {symbolic.name!r} of shape "
                f"{tuple(symbolic.shape)}. Expected: outputs with a value for each sample."
            )
        stage = self._stages.stages[index]
        position = next(i for i, tensor in enumerate(stage.outputs) if tensor is symbolic)
        results = [run.results[index, m] for run in self._whole_runs for m in range(self._pipeline.micro_batches)]
        tensor = self._join(PREDICTION, [result.tensors[position] for result in results])
        masks = [result.masks[position] for result in results]
        if masks[0] is not None:
            set_mask(tensor, self._join(PREDICTION, masks))
        return tensor

    def _targets(self) -> Any:
        """Returns targets and sample weights of the batch, on the device of the last stage."""
        leaves = [tf.nest.flatten(data[1:]) for run in self._whole_runs for data in run.data]
        joined = [self._join(BATCH, of_leaf) for of_leaf in zip(*leaves, strict=True)]
        return tf.nest.pack_sequence_as((self.y, self.sample_weight), joined)

    def _join(self, kind: str, of_micro_batches: Sequence[Any]) -> Any:
        """Returns the rows of all micro-batches, on the device of the last stage; None for None."""
        if of_micro_batches[0] is None:
            return None
        rows = self._inputs[0].shape[0]
        with tf.device(self.devices[0][-1]):
            parts = [part.results(tensor) for part, tensor in zip(self._parts, of_micro_batches, strict=True)]
            tensor = tf.concat(parts, 0)
            if tensor.shape[0] is None and rows is not None:
                tensor = tf.ensure_shape(tensor, [rows, *tensor.shape[1:]])
        self._joined.append((kind, tensor, of_micro_batches))
        return tensor

    def _record_joined(self, returned: Collection[tf.Tensor] = ()) -> None:
        """Records as sent what is used, or `returned` by the step. TensorFlow removes the rest from the step."""
        kept = {tensor.ref() for tensor in returned}
        for kind, tensor, of_micro_batches in self._joined:
            if tensor.ref() in kept or any(user.type != "Shape" for user in tensor.consumers()):
                for part, result in zip(self._parts, of_micro_batches, strict=True):
                    record_transfer(kind, [result], self.devices[0][-1], rows=part.num_rows)

    def logs(self, penalties: Sequence[tf.Tensor]) -> Any:
        """Updates the metrics of the losses and the compiled metrics, and returns the logs."""
        results = [result for run in self._whole_runs for result in run.results.values()]
        y_pred = self._outputs()
        with tf.device(self.devices[0][-1]):
            parts = [result.loss for result in results if result.loss is not None]
            losses = [tf.identity(part) for part in [*parts, *penalties]]
            of_outputs = [result.of_outputs for result in results if result.of_outputs]
            update_loss_metrics(
                self._model,
                tf.add_n(losses),
                [tf.add_n([tf.identity(part) for part in of_output]) for of_output in zip(*of_outputs, strict=True)],
                y_pred,
                tf.shape(self._inputs[0])[0],
            )
            y, sample_weight = self._targets()
            with accuracies_of_choices(self._accuracies):
                logs = self._model.compute_metrics(self.x, y, y_pred, sample_weight=sample_weight)
        self._record_joined()
        return logs


def regularization_losses(
    variables: Sequence[keras.Variable], scale: tf.Tensor | None
) -> Iterator[tuple[int, tf.Tensor, Any]]:
    """Yields for each regularized variable its index, the loss and, with a `scale`, the gradient of the scaled loss."""
    for index, variable in enumerate(variables):
        if getattr(variable, "regularizer", None) is None:
            continue
        held = held_variable(variable)
        with tf.device(held.device):
            value = held.read_value()
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(value)
                loss = tf.reduce_sum(variable.regularizer(value))  # Keras adds the elements of other shapes
            gradient = None if scale is None else tape.gradient(loss, value, tf.cast(scale, loss.dtype))
            loss = tf.cast(loss, tf.float32)
        yield index, loss, gradient


def gradients_of(model: Any, stages: ModelStages, columns: Columns, runs: Sequence[Any]) -> list[ColumnGradient]:
    """Returns the gradients of the loss of a batch, for each trainable variable those of the columns that sum them.

    These are all columns. Of columns that share a copy of the model, each sums its own gradients with those of the
    columns in the same place: first all variables of the first place follow each other, then those of the next one.
    """
    of_columns = [_of_variables(stages, columns, run, column) for column, run in enumerate(runs)]
    unscale, gradients = unscaling_of(model.optimizer), []
    paths = OptimizerUpdate(model.optimizer, model.trainable_variables).paths
    for place in range(columns.ways):
        for variable, path in zip(model.trainable_variables, paths, strict=True):
            devices = columns.devices_of(variable)[place :: columns.ways]
            unscaled: list[Any] = []
            for totals, device in zip(of_columns[place :: columns.ways], devices, strict=True):
                with tf.device(device):
                    total = totals.get(id(variable))
                    unscaled.append(None if total is None else unscale(total))
            replicas, is_split = tuple(range(place, len(columns), columns.ways)), id(variable) in columns.axes
            shape = columns.shape_of_part(variable)
            gradients.append(ColumnGradient(path, shape, is_split, replicas, devices, unscaled))
    return gradients


def by_column(sums: Sequence[Sequence[Any]], columns: Columns) -> list[list[Any]]:
    """Returns by column and variable the sums of the gradients that `gradients_of` returns."""
    count = len(sums[0]) // columns.ways
    return [list(of_copy[first : first + count]) for of_copy in sums for first in range(0, len(of_copy), count)]


def _of_variables(stages: ModelStages, columns: Columns, run: Any, column: int) -> dict[int, Any]:
    """Sums a column's gradients over the stages that share a variable, on the device that holds it."""
    totals: dict[int, Any] = {}
    for stage, gradients in zip(stages.stages, run.gradients, strict=True):
        for position, gradient in gradients.items():
            key, device = id(stage.variables[position]), columns.devices_of(stage.variables[position])[column]
            record_transfer(WEIGHT_GRADIENT, [gradient], device)
            with tf.device(device):
                totals[key] = added(totals.get(key), gradient)
    return totals
