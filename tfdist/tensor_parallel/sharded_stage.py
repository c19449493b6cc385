"""A stage that several devices compute together, each with its parts of variables, and a table of what they send."""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import logits_behind, replaced_losses
from tfdist.keras_internals.keras_symbols import get_mask, set_mask, stateless_scope
from tfdist.keras_internals.layer_calls import LayerCall, kernel_of, replaced_calls
from tfdist.pipeline.device_program import DeviceProgram
from tfdist.pipeline.stage_functions import (
    StageFunction,
    StageInputs,
    StageKind,
    StageResult,
    is_differentiable,
    tables_of_fixed_rows,
)
from tfdist.pipeline.stages import ModelStages, Stage
from tfdist.pipeline.transfers import PREDICTION, record_transfer
from tfdist.tensor_parallel.composite_layers import aware_layers_of
from tfdist.tensor_parallel.shard_group import GATHER, SUM, ShardExchange, ShardGroup
from tfdist.tensor_parallel.sharded_layers import (
    aware_call,
    dropped,
    drops_parts,
    is_dense,
    is_elementwise,
    is_softmax,
    takes_parts,
)
from tfdist.tensor_parallel.split_outputs import (
    CHOICES,
    WHOLE,
    SplitCrossentropy,
    SplitOutput,
    choices_of_parts,
    describe_outputs,
    split_outputs,
    split_softmax,
)
from tfdist.tensor_parallel.split_variable import part_shape, part_size
from tfdist.utils.formatting import align_columns, format_bytes


class ShardedStageFunction(StageFunction):
    """A stage and its gradient, traced once for all devices that share it.

    Attributes:
        program: Calls it on the devices.
        exchanges: What its layers exchange.
        split: By the position among the stage's outputs, the outputs of the model that stay split.
    """

    _group: ShardGroup
    recomputes = False  # `tf.gradients` of one graph for both passes gives no gradients through such functions

    def __init__(
        self,
        model: Any,
        stages: ModelStages,
        stage: Stage,
        kind: StageKind,
        example: StageInputs,
        axes: Mapping[int, int],
        ways: int,
    ) -> None:
        """Traces the function for arguments of one device like `example`; `ways` devices share the stage.

        `axes` has by the id of a split variable its axis.
        """
        self._axes, self._ways = axes, ways
        self._targets: list[int] = []  # outputs whose gradients the backward pass takes; that of the loss follows them
        self.exchanges: list[ShardExchange] = []
        self.split: dict[int, SplitOutput] = {}
        super().__init__(model, stages, stage, kind, example)

    def forward(
        self, arguments: Sequence[StageInputs], devices: Sequence[str], after: Sequence[list[tf.Operation]], rows: Any
    ) -> tuple[Sequence[StageResult], Any]:
        """See `StageFunction`."""
        results, state = self.program.forward(arguments, devices, after, rows)
        return results, (results, state, arguments)

    def complete_result(self, results: Sequence[StageResult], device: str, rows: Any) -> StageResult:
        """See `StageFunction`."""
        outputs, choices = list(results[0].tensors), iter(results[0].choices)
        for position, output in self.split.items():
            shape = self.stage.outputs[position].shape
            parts = [result.tensors[position] for result in results]
            if not self._kind.has_loss or output.metrics == WHOLE:
                record_transfer(PREDICTION, parts, device, rows=rows)
                with tf.device(device):
                    outputs[position] = tf.concat(parts, -1)[..., : shape[-1]]  # without padding
                outputs[position].set_shape([outputs[position].shape[0], *shape[1:]])
            elif output.metrics == CHOICES:
                outputs[position] = next(choices)
        return results[0]._replace(tensors=outputs)

    @property
    def accuracies(self) -> Sequence[Any]:
        """See `StageFunction`."""
        chosen = [output for output in self.split.values() if self._kind.has_loss and output.metrics == CHOICES]
        return [metric for output in chosen for metric in output.accuracies]

    def backward(
        self, to_differentiate: Any, seeds: Sequence[Sequence[Any]], after: Sequence[list[tf.Operation]]
    ) -> list[list[Any]]:
        """See `StageFunction`."""
        results, state, arguments = to_differentiate
        of_targets = []
        for result, (*of_outputs, of_loss), device in zip(results, seeds, state.devices, strict=True):
            with tf.device(device):
                pairs = [(of_outputs[position], result.tensors[position]) for position in self._targets]
                of_device = [tf.zeros_like(output) if seed is None else seed for seed, output in pairs]
            of_targets.append(of_device if of_loss is None else [*of_device, of_loss])
        if not of_targets[0] or not (self.weights or self.inputs):  # as in a first stage whose layers are frozen
            return [[] for _ in results]
        by_device = []
        gradients = self.program.backward(state, of_targets, after)
        for of_sources, inputs, device in zip(gradients, arguments, state.devices, strict=True):
            with tf.device(device):
                sources = self._sources(inputs) if of_sources else []
                by_device.append([_as_on_tape(*pair) for pair in zip(of_sources, sources, strict=True)])
        return by_device

    def _traced(self, specs: StageInputs) -> Any:
        self.program = DeviceProgram(self._differentiable, [specs], self._ways, ShardGroup)
        traced, received = self.program.traced, self.program.received
        self.fixed_tables = tables_of_fixed_rows(traced, len(self.stage.variables), received)
        return self.program

    def _differentiable(self, group: ShardGroup, arguments: StageInputs) -> tuple[StageResult, list[Any]]:
        self._group, self.exchanges = group, group.made
        self._of_losses: dict[int, SplitCrossentropy] = {}
        stage, sources = self.stage, self._sources(arguments)
        result = self._run(arguments)
        wanted = {id(tensor) for other in self._stages.stages[stage.index + 1 :] for tensor in other.inputs}
        if not self._kind.has_loss:  # which would differentiate the outputs of the model
            wanted |= {id(tensor) for tensor in self._stages.graph.outputs}
        self._targets = [
            position
            for position, (symbolic, tensor) in enumerate(zip(stage.outputs, result.tensors, strict=True))
            if id(symbolic) in wanted and is_differentiable(tensor)
        ]
        targets = [result.tensors[position] for position in self._targets]
        targets += [] if result.loss is None else [result.loss]
        if not targets or not sources:
            return result, []
        gradients = tf.gradients(targets, sources, [group.seed(target) for target in targets])
        return result, [_as_tensors(gradient) for gradient in gradients]

    def _computed(self, arguments: StageInputs) -> dict[int, Any]:
        """Returns the results of the layer calls; whole are those of inputs, and outputs that are not in `split`."""
        stage = self.stage
        values = self._received(arguments)
        symbols: dict[int, str] = {}
        for call in stage.calls:
            results = self._called(call, values)
            values |= {id(symbolic): result for symbolic, result in zip(call.outputs, results, strict=True)}
            symbols |= dict.fromkeys(map(id, call.outputs), call.name)
        self.split = self._split_outputs(values)
        kept = {id(stage.outputs[position]) for position in self.split}
        for symbolic in (*stage.outputs, *self._stages.graph.outputs):
            if id(symbolic) in symbols and id(symbolic) not in kept:
                self._group.layer = symbols[id(symbolic)]
                values[id(symbolic)] = self._whole(values[id(symbolic)], symbolic)
        return values

    def _split_outputs(self, values: Mapping[int, Any]) -> dict[int, SplitOutput]:
        """Returns the outputs that stay split: those of the model whose losses are computed from parts."""
        stage, kept = self.stage, {}
        if stage.index < len(self._stages.stages) - 1:
            return {}
        numbers = [id(symbolic) for symbolic in self._stages.graph.outputs]
        for output in split_outputs(self._model, self._stages.graph):
            symbolic = self._stages.graph.outputs[output.number]
            position = next((index for index, tensor in enumerate(stage.outputs) if tensor is symbolic), None)
            is_needed = self._kind.has_loss and output.reason
            if position is None or is_needed or numbers.count(id(symbolic)) > 1 or len(symbolic.shape) < 2:
                continue
            if self._split_axis(values[id(symbolic)], symbolic) == len(symbolic.shape) - 1:
                kept[position] = output
        return kept

    def _compiled_loss(self, step: Any, data: Any, values: dict[int, Any]) -> tuple[Any, list[Any]]:
        calls: dict[int, SplitCrossentropy] = {}
        for position, output in self.split.items():
            self._group.layer = f"loss {output.number}"
            for index, options in output.losses.items():
                with_choices = output.metrics == CHOICES and position not in self._of_losses
                size = self.stage.outputs[position].shape[-1]
                calls[index] = SplitCrossentropy(self._group, size=size, **options, with_choices=with_choices)
                self._of_losses.setdefault(position, calls[index])
        with replaced_losses(self._model, calls):
            return super()._compiled_loss(step, data, values)

    def _choices(self, values: dict[int, Any]) -> list[tf.Tensor]:
        choices = []
        for position, output in self.split.items():
            if output.metrics == CHOICES and self._kind.has_loss:
                of_loss, part = self._of_losses.get(position), values[id(self.stage.outputs[position])]
                of_output = None if of_loss is None else of_loss.choices
                if of_output is None:
                    of_output = choices_of_parts(part, self._group, self.stage.outputs[position].shape[-1])
                choices.append(of_output)
        return choices

    def _called(self, call: LayerCall, values: Mapping[int, Any]) -> list[Any]:
        group = self._group
        group.layer = call.name
        known = aware_layers_of(call, self._axes, training=self._kind.training)
        aware = known.layers
        inputs = {id(symbolic): values[id(symbolic)] for symbolic in call.inputs}
        splits = {self._split_axis(values[id(symbolic)], symbolic) for symbolic in call.inputs}
        has_mask = any(get_mask(tensor) is not None for tensor in inputs.values())
        replaced = {layer: aware_call(layer, group, self._axes) for layer in aware}
        replaced |= {layer: self._dropped(layer, axis, size) for layer, axis, size in known.dropouts}
        for layer in [layer for layer in aware if id(layer) in known.whole]:
            replaced[layer] = self._with_whole_result(layer, replaced[layer])
        if drops_parts(call.operation) and len(splits) == 1 and splits != {None}:
            layer, axis = call.operation, splits.copy().pop()
            assert axis is not None
            replaced[layer] = self._dropped(layer, axis, call.inputs[0].shape[axis])
        elif is_softmax(call.operation) and splits == {len(call.inputs[0].shape) - 1} and not has_mask:
            size = call.inputs[0].shape[-1]
            replaced[call.operation] = lambda x, mask=None: split_softmax(x, group, size)
        elif not _takes_parts(call, aware, splits):
            inputs = {id(symbolic): self._whole(values[id(symbolic)], symbolic) for symbolic in call.inputs}
        others = [variable for variable in call.variables if id(variable) not in known.variables]
        with self._gathered(others), replaced_calls(replaced):
            return list(call(inputs, training=self._kind.training))

    def _dropped(self, layer: Any, axis: int, size: int | None) -> Any:
        call = type(layer).call.__get__(layer)
        return lambda x, training=False: dropped(layer, call, self._group, x, training, axis=axis, size=size)

    def _with_whole_result(self, layer: Any, call: Any) -> Any:
        """Returns the call of an inner layer, a Dense or an embedding, which gathers a split result."""

        def whole(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            width = kernel_of(layer).shape[-1] if is_dense(layer) else layer.output_dim
            width = layer.input_dim if kwargs.get("reverse") else width
            return self._group.gather(result, -1, width) if result.shape[-1] != width else result

        return whole

    @contextlib.contextmanager
    def _gathered(self, variables: Any) -> Any:
        """In the body, split variables have their complete values."""
        scope = stateless_scope()
        split = [variable for variable in variables if id(variable) in self._axes]
        parts = [(variable, scope.get_current_value(variable)) for variable in split]
        for variable, part in parts:
            axis = self._axes[id(variable)]
            whole_value = self._group.gather(part, axis, variable.shape[axis], has_samples=False)
            scope.add_update((variable, whole_value))
        whole = [scope.get_current_value(variable) for variable, _ in parts]
        yield
        for (variable, part), before in zip(parts, whole, strict=True):
            if scope.get_current_value(variable) is not before:
                raise ValueError(
                    f"A layer changes a split variable. Received: {variable.path!r}, which the layout map splits. "
                    "Expected: states that are whole, such as moving statistics. Exclude this path from the layout map."
                )
            scope.add_update((variable, part))

    def _whole(self, tensor: Any, symbolic: Any) -> Any:
        axis = self._split_axis(tensor, symbolic)
        if axis is None:
            return tensor
        logits = logits_behind(tensor)  # from which losses are computed, not from probabilities that may be zero
        if logits is None:
            result = self._group.gather(tensor, axis, symbolic.shape[axis])
        else:
            result = keras.activations.softmax(self._group.gather(logits, axis, symbolic.shape[axis]))
        if (mask := get_mask(tensor)) is not None:
            set_mask(result, mask)
        return result

    def _split_axis(self, tensor: Any, symbolic: Any) -> int | None:
        """Returns the axis in which a tensor is a part of what the symbolic tensor describes."""
        sizes = zip(tensor.shape, symbolic.shape, strict=True)
        # Symbolic shapes may be wrong, as those of Keras' scores of attention to other sequences.
        pairs, padded = enumerate(sizes), self._padded_sizes
        return next((i for i, (own, size) in pairs if own and own * self._ways in (size, padded.get(size))), None)

    @functools.cached_property
    def _padded_sizes(self) -> dict[int, int]:
        """By the size of a split axis that is padded, the size with padding."""
        pairs = [(variable, self._axes.get(id(variable))) for variable in self._stages.variables]
        sizes = [int(variable.shape[axis]) for variable, axis in pairs if axis is not None]
        return {size: part_size(size, self._ways) * self._ways for size in sizes if size % self._ways}


def _takes_parts(call: LayerCall, aware: Any, splits: set[int | None]) -> bool:
    """Whether a layer call takes inputs that are split along these axes, or whole where the axis is None."""
    axis, *others = splits or {None}
    ranks = {len(symbolic.shape) for symbolic in call.inputs}
    if others or axis is None or len(ranks) > 1:
        return False  # whole ones stay as they are
    return is_elementwise(call.operation) or bool(aware) and takes_parts(call.operation, axis - ranks.pop())


def _as_tensors(gradient: Any) -> Any:
    return (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else gradient


def _as_on_tape(gradient: Any, source: tf.Tensor) -> Any:
    """Returns a gradient as a tape has it, of what `_as_tensors` has made of it."""
    return tf.IndexedSlices(*gradient, tf.shape(source)) if isinstance(gradient, tuple) else gradient


_HEADINGS = ("layer", "variables", "sums/sample", "gathers/sample", "gathers/micro-batch")


def shard_table(model: Any, stages: ModelStages, axes: Mapping[int, int], ways: int) -> Iterator[str]:
    """Yields the lines of a table of the layers that exchange tensors: the bytes that each device of a stage sends.

    `axes` has by the id of a split variable its axis; `ways` devices share a stage.
    """
    functions = [_function(model, stages, stage, axes, ways) for stage in stages.stages]
    of_all = [exchange for function in functions for exchange in function.exchanges]
    rows, complete = [], []
    calls = {call.name: call for stage in stages.stages for call in stage.calls}  # a shared layer has one row
    for call in calls.values():
        exchanges = [exchange for exchange in of_all if exchange.layer == call.name]
        split = {id(variable) for variable in call.variables if id(variable) in axes}
        is_split, is_complete = bool(split), bool(split - aware_layers_of(call, axes, training=True).variables)
        complete += [call.name] if is_complete else []
        if exchanges:
            kind = "complete" if is_complete else "split" if is_split else "whole"
            sums = [exchange for exchange in exchanges if exchange.kind == SUM]
            gathers = [exchange for exchange in exchanges if exchange.kind == GATHER]
            fixed = [gather for gather in gathers if None not in list(gather.shape)]
            values = [gather for gather in gathers if None in list(gather.shape)]
            rows.append([call.name, kind, *(format_bytes(_sent(part, ways)) for part in (sums, values, fixed))])
    number = sum(id(variable) in axes for variable in stages.variables)
    yield f"{ways} devices share each stage: {number} of {len(stages.variables)} variables are split"
    if rows:
        head, *body = align_columns([_HEADINGS, *rows], left=(0, 1))
        yield from (head, "-" * max(map(len, (head, *body))), *body)
    if complete:
        yield f"computed with complete variables, which are gathered for each micro-batch: {', '.join(complete)}"
    split_by_position = functions[-1].split
    makers = {id(tensor): call.name for call in stages.stages[-1].calls for tensor in call.outputs}
    names = [makers[id(stages.stages[-1].outputs[position])] for position in split_by_position]
    yield from describe_outputs(model, list(split_by_position.values()), names)


def _sent(exchanges: list[ShardExchange], ways: int) -> int:
    """The bytes that one device sends; of a sum 2 (k - 1) / k of its size, of a gather k - 1 times its part."""
    total = 0.0
    for exchange in exchanges:
        size = math.prod(1 if length is None else length for length in exchange.shape) * exchange.dtype.size
        total += size * (ways - 1) * (2 / ways if exchange.kind == SUM else 1)
    return round(total)


def _function(
    model: Any, stages: ModelStages, stage: Stage, axes: Mapping[int, int], ways: int
) -> ShardedStageFunction:
    """Returns the function of a stage for a micro-batch in training, apart from its losses."""
    scalar = tf.TensorSpec([], tf.float32)
    example = StageInputs(
        values=[
            tf.TensorSpec(part_shape(variable.shape, axes.get(id(variable)), ways), variable.dtype)
            for variable in stage.variables
        ],
        tensors=[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in stage.inputs],
        masks=[None] * len(stage.inputs),
        data=None,
        fraction=scalar,
        is_real=scalar,
        divisors=tf.TensorSpec([None], tf.float32),
    )
    kind = StageKind(training=True, has_loss=False, is_even=False)
    return ShardedStageFunction(model, stages, stage, kind, example, axes, ways)
