"""Outputs of a model that stay split over the devices of its last stage, and what their losses and metrics need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.keras_internals.compiled_loss import has_built_loss, overridden_method, overrides_compute_loss
from tfdist.keras_internals.compiled_outputs import (
    crossentropy_options,
    is_accuracy,
    losses_of_outputs,
    metrics_of_outputs,
)
from tfdist.keras_internals.functional_graph import FunctionalGraph
from tfdist.model_parallel.split_softmax import LARGEST_INDEX

WHOLE, CHOICES, NOTHING = "whole", "choices", "nothing"


@dataclass(frozen=True)
class SplitOutput:
    """An output of which each device has a part of the last axis.

    Attributes:
        number: Its number among the outputs.
        losses: By number of a loss of the model, the options of its cross-entropy, which is computed from the parts.
        reason: What needs whole outputs on all devices; empty if nothing does.
        accuracies: The metrics that take the index of the largest element.
        metrics: What the metrics take: `WHOLE` outputs, on one device; `CHOICES`, the indices; or `NOTHING`.
    """

    number: int
    losses: Mapping[int, Mapping[str, Any]]
    reason: str
    accuracies: Sequence[Any]
    metrics: str


def split_outputs(model: Any, graph: FunctionalGraph) -> list[SplitOutput]:
    """Returns for each output of a model what a step does with it if it is split.

    Args:
        model: The Keras model, which may be compiled.
        graph: Its graph.
    """
    count = len(graph.outputs)
    losses = losses_of_outputs(model, graph.packed_outputs, count) if has_built_loss(model) else []
    of_outputs = metrics_of_outputs(model, graph.packed_outputs, count)
    own_loss = overrides_compute_loss(model)
    own_metrics = overridden_method(model, "compute_metrics") is not None
    found = []
    for number, metrics in enumerate(of_outputs):
        options: dict[int, Mapping[str, Any]] = {}
        reason = f"{type(model).__name__}.compute_loss" if own_loss else ""
        for index, (numbers, loss) in enumerate(losses):
            of_loss = crossentropy_options(loss) if numbers == [number] else None
            if number in numbers and of_loss is None:
                reason = getattr(loss, "name", type(loss).__name__)
            elif of_loss is not None:
                options[index] = of_loss
        known = not own_metrics and all(map(is_accuracy, metrics)) and graph.outputs[number].shape[-1] < LARGEST_INDEX
        needs = WHOLE if not known else CHOICES if metrics else NOTHING
        found.append(SplitOutput(number, {} if reason else options, reason, metrics if known else (), needs))
    return found


def describe_outputs(model: Any, outputs: Sequence[SplitOutput], names: Sequence[str]) -> list[str]:
    """Returns a line for each split output: what its loss and its metrics exchange.

    Args:
        model: The Keras model. Its losses are known after the first batch.
        outputs: The split outputs.
        names: Of each the name of the layer that returns it.
    """
    lines, is_known = [], has_built_loss(model) or overrides_compute_loss(model)
    for output, name in zip(outputs, names, strict=True):
        if not is_known:
            lines.append(f"output {name} is split; what is gathered for losses and metrics is known after a batch")
        elif output.reason:
            lines.append(f"output {name} is gathered on all devices of the last stage for {output.reason}")
        else:
            computed = "loss and accuracy are" if output.metrics == CHOICES else "the loss is"
            gathered = "; gathered on one device for metrics" if output.metrics == WHOLE else ""
            lines.append(f"output {name} stays split: {computed} computed from the parts{gathered}")
    return lines
