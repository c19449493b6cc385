"""Shows the stages of a model, and what the devices of a stage send to each other, as tables."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.placed_variables import compiled_optimizer, held_variable
from tfdist.pipeline.layer_costs import elements_of, layer_costs
from tfdist.pipeline.pipeline import Pipeline
from tfdist.pipeline.pipeline_schedule import most_held
from tfdist.pipeline.stage_functions import StageInputs, StageKind
from tfdist.pipeline.stages import ModelStages, Stage
from tfdist.tensor_parallel.composite_layers import aware_layers_of
from tfdist.tensor_parallel.shard_group import GATHER, SUM, ShardExchange
from tfdist.tensor_parallel.sharded_stage import ShardedStageFunction
from tfdist.tensor_parallel.split_outputs import describe_outputs
from tfdist.tensorflow_internals.split_variables import part_size
from tfdist.utils.formatting import align_columns, format_bytes, format_count, short_device

_HEADINGS = ("stage", "device", "layers", "parameters", "cost", "sends/sample", "held")


def stage_table(stages: ModelStages, pipeline: Pipeline, columns: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table of the stages, with the expected bubble.

    Args:
        stages: The stages of a model.
        pipeline: The options of the pipeline.
        columns: By column and stage, the device.
    """
    of_calls = iter(layer_costs(stages.graph.calls, pipeline.costs))
    costs = [sum(next(of_calls) for _ in stage.calls) for stage in stages.stages]
    total = max(sum(costs), 1)
    rows = [
        [
            str(stage.index),
            " ".join(short_device(devices[stage.index]) for devices in columns),
            _layers(stage),
            format_count(_parameters(stages, stage)),
            f"{cost / total:.0%}",
            format_bytes(sum(_sent_bytes(stages, stage, tensor) for tensor in stage.outputs)),
            str(most_held(pipeline.schedule, stage.index, pipeline.stages, pipeline.micro_batches)),
        ]
        for stage, cost in zip(stages.stages, costs, strict=True)
    ]
    head, *body = align_columns([_HEADINGS, *rows], left=(0, 1, 2))
    yield from (head, "-" * max(map(len, (head, *body))), *body)
    yield (
        f"{pipeline.micro_batches} micro-batches, schedule {pipeline.schedule}: expected bubble "
        f"{pipeline.bubble_fraction:.0%} of a step if all stages take the same time"
    )


def _layers(stage: Stage) -> str:
    first, last = stage.calls[0].name, stage.calls[-1].name
    return first if len(stage.calls) == 1 else f"{first} ... {last} ({len(stage.calls)})"


def _parameters(stages: ModelStages, stage: Stage) -> int:
    owned = [variable for variable in stage.variables if stages.owner[id(variable)] == stage.index]
    return sum(int(tf.TensorShape(variable.shape).num_elements() or 0) for variable in owned)


def _sent_bytes(stages: ModelStages, stage: Stage, tensor: Any) -> int:
    """What a stage sends to others of one sample of a tensor."""
    receivers = sum(any(tensor is received for received in other.inputs) for other in stages.stages[stage.index + 1 :])
    return receivers * elements_of(tensor) * tf.as_dtype(tensor.dtype).size


def variable_bytes_by_device(model: Any) -> dict[str, int]:
    """Returns by the full name of a device the bytes of weights and of the optimizer's variables on it.

    Args:
        model: A Keras model. Its copies in other columns, and the parts of split variables, count where they are.
    """
    optimizer = compiled_optimizer(model)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    by_device: dict[str, int] = defaultdict(int)
    for variable in {id(variable): variable for variable in variables}.values():
        held = held_variable(variable)
        for on_device in getattr(held, "shards", None) or (held, *getattr(held, "copies", ())):
            by_device[on_device.device] += math.prod(on_device.shape) * on_device.dtype.size
    return dict(by_device)


_HEADINGS_OF_SHARDS = ("layer", "variables", "sums/sample", "gathers/sample", "gathers/micro-batch")


def shard_table(model: Any, stages: ModelStages, axes: Mapping[int, int], ways: int) -> Iterator[str]:
    """Yields the lines of a table of the layers that exchange tensors: the bytes that each device of a stage sends.

    Args:
        model: The Keras model.
        stages: Its stages.
        axes: By the id of a split variable its axis.
        ways: The number of devices of a stage.
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
        head, *body = align_columns([_HEADINGS_OF_SHARDS, *rows], left=(0, 1))
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

    def part(variable: Any) -> tf.TensorSpec:
        axis = axes.get(id(variable))
        shape = [part_size(size, ways) if index == axis else size for index, size in enumerate(variable.shape)]
        return tf.TensorSpec(shape, variable.dtype)

    scalar = tf.TensorSpec([], tf.float32)
    example = StageInputs(
        values=[part(variable) for variable in stage.variables],
        tensors=[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in stage.inputs],
        masks=[None] * len(stage.inputs),
        data=None,
        fraction=scalar,
        is_real=scalar,
        divisors=tf.TensorSpec([None], tf.float32),
    )
    kind = StageKind(training=True, has_loss=False, is_even=False)
    return ShardedStageFunction(model, stages, stage, kind, example, axes, ways)
