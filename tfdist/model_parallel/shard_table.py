"""Shows what the devices of a stage send to each other, layer by layer."""

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.composite_layers import aware_layers_of
from tfdist.model_parallel.shard_group import GATHER, SUM, ShardExchange
from tfdist.model_parallel.sharded_stage import ShardedStageFunction
from tfdist.model_parallel.split_outputs import describe_outputs
from tfdist.model_parallel.stage_functions import StageInputs, StageKind
from tfdist.model_parallel.stages import ModelStages, Stage
from tfdist.tensorflow_internals.split_variables import part_size
from tfdist.utils.formatting import align_columns, format_bytes

_HEADINGS = ("layer", "variables", "sums/sample", "gathers/sample", "gathers/micro-batch")
_LEFT = (0, 1)


def shard_table(model: Any, stages: ModelStages, axes: Mapping[int, int], ways: int) -> Iterator[str]:
    """Yields the lines of a table of the layers that exchange tensors: the bytes that each device of a stage sends.

    Args:
        model: The Keras model.
        stages: Its stages.
        axes: By the id of a split variable its axis.
        ways: The number of devices of a stage.
    """
    functions = [_function(model, stages, stage, axes, ways) for stage in stages.stages]
    made = [one for function in functions for one in function.exchanges]
    rows, complete = [], []
    calls = {call.name: call for stage in stages.stages for call in stage.calls}  # a shared layer has one row
    for call in calls.values():
        own = [one for one in made if one.layer == call.name]
        split = {id(variable) for variable in call.variables if id(variable) in axes}
        is_split, is_complete = bool(split), bool(split - aware_layers_of(call, axes, training=True).variables)
        complete += [call.name] if is_complete else []
        if own:
            kind = "complete" if is_complete else "split" if is_split else "whole"
            sums = [one for one in own if one.kind == SUM]
            gathers = [one for one in own if one.kind == GATHER]
            fixed = [one for one in gathers if None not in list(one.shape)]
            values = [one for one in gathers if None in list(one.shape)]
            rows.append([call.name, kind, *(format_bytes(_sent(part, ways)) for part in (sums, values, fixed))])
    number = sum(id(variable) in axes for variable in stages.variables)
    yield f"{ways} devices share each stage: {number} of {len(stages.variables)} variables are split"
    if rows:
        head, *body = align_columns([_HEADINGS, *rows], left=_LEFT)
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
    for one in exchanges:
        size = tf.TensorShape([1 if length is None else length for length in one.shape]).num_elements() * one.dtype.size
        total += size * (ways - 1) * (2 / ways if one.kind == SUM else 1)
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
