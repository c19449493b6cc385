"""Sums of gradients of an unfinished update, in a training that accumulates or splits them in another way."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tfdist.keras_internals.model_state import OptimizerState, components
from tfdist.recovery.compatibility import Mismatch, find_variable_mismatch, saved_specs
from tfdist.recovery.resharding import AccumulationProgress, convert_micro_steps
from tfdist.recovery.variable_names import ACCUMULATORS, EXACT_WEIGHTS, NamedVariables, variable_specs
from tfdist.recovery.worker_tensors import multiply

Json = dict[str, Any]


def accumulation_progress(optimizer: OptimizerState, saved: Json) -> AccumulationProgress:
    """Returns where accumulation resumes.

    Args:
        optimizer: The optimizer of the program.
        saved: Its description in the checkpoint.
    """
    return convert_micro_steps(saved["micro_steps"], saved["accumulation_steps"], optimizer.accumulation_steps)


def may_lack_accumulators(named: NamedVariables, description: Json) -> bool:
    """Whether accumulators may exist on one side only.

    That is so between two updates, when they are zero, and if the number of micro-steps of an update differs.
    """
    saved_steps = [described["accumulation_steps"] for described in description["optimizers"]]
    steps = [optimizer.accumulation_steps for optimizer in named.optimizers]
    return saved_steps != steps or _is_between_updates(description)


def find_shared_mismatch(named: NamedVariables, shared: Mapping[str, np.ndarray], description: Json) -> Mismatch | None:
    """Returns the first difference in what is equal on all replicas; sums of an unfinished update may be."""
    # Exact weights replace what weights were rounded to, if they are saved and needed.
    ignored = [EXACT_WEIGHTS, *([ACCUMULATORS] if may_lack_accumulators(named, description) else [])]
    return _find_split_mismatch(named, shared, description) or find_variable_mismatch(
        saved_specs(shared, description["paths"], ignored), variable_specs(named.shared, ignored)
    )


def _find_split_mismatch(named: NamedVariables, shared: Collection[str], description: Json) -> Mismatch | None:
    """Returns the difference if sums of an unfinished update are split over the replicas on one side only."""
    saved, present = (any(name.startswith(ACCUMULATORS) for name in side) for side in (shared, named.shared))
    have_some = any(one["accumulation_steps"] > 1 for one in description["optimizers"]) and any(
        optimizer.accumulators for optimizer in named.optimizers
    )
    if saved == present or not have_some or _is_between_updates(description):
        return None
    kinds = ["split over the replicas" if is_split else "whole on each replica" for is_split in (saved, present)]
    return Mismatch("where the sums of gradients of an unfinished update are", *kinds)


def rescale_accumulators(
    strategy: Any, named: NamedVariables, saved: Mapping[str, Any], description: Json, *, are_split: bool
) -> None:
    """Converts restored sums to the number of micro-steps of the program; those that were not saved become zero.

    Args:
        strategy: The strategy of the program.
        named: The variables of the program.
        saved: The names of what was restored.
        description: The description in the checkpoint.
        are_split: Whether to convert those that are split over the replicas, or the others.
    """
    for index, (optimizer, described) in enumerate(zip(named.optimizers, description["optimizers"], strict=True)):
        for number, accumulator in enumerate(optimizer.accumulators):
            name = f"{ACCUMULATORS}{index}/{number}"
            if (name in named.shared) != are_split:
                continue
            factor = accumulation_progress(optimizer, described).factor if name in saved else 0.0
            multiply(components(strategy, accumulator), factor)


def _is_between_updates(description: Json) -> bool:
    return not any(one["micro_steps"] % one["accumulation_steps"] for one in description["optimizers"])
