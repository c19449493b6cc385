"""The variables that a step of a model may write, on this worker."""

import itertools
import math
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
    if (updates := _local_updates(model)) is not None:
        shared, own = updates.saved_variables(list(optimizers_of(model)))
        found += [*shared.values(), *own.values(), *accumulators_of(model)]
    found += generator_variables().values()
    return [one for variable in found for one in components(model.distribute_strategy, variable)]


def accumulators_of(model: Any) -> list[Any]:
    """Returns the `tf.Variable`s in which the optimizers of a model add up the gradients of this worker's replicas."""
    return [
        component
        for optimizer in optimizers_of(model)
        for accumulator in OptimizerState(optimizer).accumulators
        for component in components(model.distribute_strategy, accumulator)
    ]


def accumulates(model: Any) -> bool:
    """Returns whether an optimizer accumulates gradients of all workers over several steps.

    What workers accumulate that train by themselves is their own, and lost with them.
    """
    return bool(_accumulating(model))


def accumulation_counts(model: Any) -> dict[int, tuple[int, int]]:
    """Returns how many steps each optimizer that accumulates has made, and over how many it does, by its `id`."""
    return {number: (state.micro_steps, state.accumulation_steps) for number, state in _accumulating(model).items()}


def check_updates(model: Any) -> None:
    """Refuses optimizers of parts of the model, and those that never update in the same step.

    Raises:
        ValueError: There are such.
    """
    if has_compiled_parts(model):
        raise ValueError(
            "The optimizer of a part of a model is not taken back when a worker is lost. Received: a compiled model "
            "within the model that is trained, under a strategy with `elastic`. Expected: all optimizers in attributes "
            "of the trained model. Assign them there, and do not compile its parts."
        )
    for one, other in itertools.combinations(_accumulating(model).values(), 2):
        steps = one.accumulation_steps, other.accumulation_steps
        if (one.micro_steps - other.micro_steps) % math.gcd(*steps):
            raise ValueError(
                "What a lost worker had accumulated is computed again from the last step in which all optimizers have "
                "updated. Received: two optimizers that never do so in one step: they accumulate over "
                f"{steps[0]} and {steps[1]} micro-steps, and have made {one.micro_steps} and {other.micro_steps}, "
                "under a strategy with `elastic`. Expected: common steps, now and then. Create the optimizers "
                "together, or with one number of micro-steps."
            )


def _local_updates(model: Any) -> Any:
    """Returns how workers train by themselves between two exchanges of weights, `None` if they do not."""
    return getattr(model.distribute_strategy, "local_updates", None)


def _accumulating(model: Any) -> dict[int, OptimizerState]:
    if _local_updates(model) is not None:
        return {}
    states = {id(optimizer): OptimizerState(optimizer) for optimizer in optimizers_of(model)}
    return {number: state for number, state in states.items() if state.accumulation_steps > 1}
