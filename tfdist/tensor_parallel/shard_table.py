"""Shows what the devices of a stage send to each other as a table."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.pipeline.stage_functions import StageInputs, StageKind
from tfdist.pipeline.stages import ModelStages, Stage
from tfdist.tensor_parallel.composite_layers import aware_layers_of
from tfdist.tensor_parallel.shard_group import GATHER, SUM, ShardExchange
from tfdist.tensor_parallel.sharded_stage import ShardedStageFunction
from tfdist.tensor_parallel.split_outputs import describe_outputs
from tfdist.tensor_parallel.split_variable import part_shape
from tfdist.utils.formatting import align_columns, format_bytes

_HEADINGS = ("layer", "variables", "sums/sample", "gathers/sample", "gathers/micro-batch")


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
