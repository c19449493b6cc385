"""Shows the stages of a model as a table, and the bytes that devices hold."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable
from tfdist.pipeline.layer_costs import elements_of, layer_costs
from tfdist.pipeline.pipeline import Pipeline
from tfdist.pipeline.pipeline_schedule import most_held
from tfdist.pipeline.stages import ModelStages, Stage
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
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    by_device: dict[str, int] = defaultdict(int)
    for variable in {id(variable): variable for variable in variables}.values():
        held = held_variable(variable)
        for on_device in getattr(held, "in_columns", (held,)):
            by_device[on_device.device] += math.prod(on_device.shape) * on_device.dtype.size
    return dict(by_device)
