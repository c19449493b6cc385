"""The variables that a step of a model may write, on this worker."""

from typing import Any

from tfdist.keras_internals.model_state import (
    OptimizerState,
    components,
    has_compiled_parts,
    model_variables,
    optimizers_of,
)
from tfdist.recovery.random_generators import generator_variables


def variables_of_steps(model: Any, *, with_metrics: bool = True) -> list[Any]:
    """Returns the `tf.Variable`s of a model, its metrics, its optimizers and the global random generators."""
    found = [variable.variable for variable in model_variables(model)]
    found += model.metrics_variables if with_metrics else []
    for optimizer in optimizers_of(model):
        found += OptimizerState(optimizer).variables
    of_replicas = [one for variable in found for one in components(model.distribute_strategy, variable)]
    return [*of_replicas, *generator_variables().values()]


def check_updates(model: Any) -> None:
    """Refuses optimizers that accumulate gradients over several steps, and those of parts of the model.

    Raises:
        ValueError: There is one.
    """
    if has_compiled_parts(model):
        raise ValueError(
            "The optimizer of a part of a model is not taken back when a worker is lost. Received: a compiled model "
            "within the model that is trained, under a strategy with `elastic`. Expected: all optimizers in attributes "
            "of the trained model. Assign them there, and do not compile its parts."
        )
    for optimizer in optimizers_of(model):
        steps = OptimizerState(optimizer).accumulation_steps
        if steps > 1:
            raise ValueError(
                "Accumulated gradients of a lost worker would be lost with it. Received: an optimizer that accumulates "
                f"over {steps} micro-steps, under a strategy with `elastic`. Expected: an update in each step. Use "
                "`MultiWorkerMirroredStrategy(micro_batches=...)`, which divides a step, or larger batches."
            )
