"""Searches the plans for a number of workers: drops what does not fit, orders the rest, and gives the reasons."""

from collections.abc import Sequence
from typing import NamedTuple

from tfdist.planning.candidates import Candidate, candidates
from tfdist.planning.cost_terms import Conditions, measured_compilations
from tfdist.planning.group_exchanges import exchange_of
from tfdist.planning.measurements import DENSE, Measurements
from tfdist.planning.plan_table import code_of
from tfdist.planning.plans import Plan
from tfdist.planning.predict_model_parallel import bubble
from tfdist.utils.formatting import format_bytes, format_seconds

TIE = 0.05
"""Plans whose predicted times differ by less are equally good: two runs of one benchmark differ by as much."""


class FoundPlans(NamedTuple):
    """The plans for a number of workers."""

    plans: list[Plan]  # those that fit, best first
    too_large: list[tuple[Plan, int]]  # those that do not, with the missing bytes; the smallest excess first


def find_plans(measured: Measurements, conditions: Conditions, workers: int) -> FoundPlans:
    """Returns all sensible plans: none if there are more devices than samples in a batch.

    They are ordered by samples in a second. Parameter servers and stages, whose chief's own time is not measured,
    follow all others. Among plans within 5 % of the fastest one that is left, the simplest is first: exact before
    inexact, fewer options before more, then the smaller error of a gradient.
    """
    fitting: dict[bool, list[Candidate]] = {False: [], True: []}  # by whether there is a chief
    excess: list[tuple[Candidate, float]] = []
    dense_bytes = 0.0
    for candidate in candidates(measured, conditions, workers):
        if candidate.prediction.memory_bytes <= conditions.memory_bytes:
            fitting[candidate.has_chief].append(candidate)
        else:
            excess.append((candidate, candidate.prediction.memory_bytes - conditions.memory_bytes))
        if candidate.method == DENSE and candidate.complexity == 0:
            dense_bytes = max(dense_bytes, candidate.prediction.wire_bytes)
    excess.sort(key=lambda pair: (pair[1], _complexity(measured, pair[0])))
    ordered = [*_by_speed(measured, fitting[False]), *_by_speed(measured, fitting[True])]
    return FoundPlans(
        [_plan(measured, candidate, dense_bytes) for candidate in ordered],
        [(_plan(measured, candidate, dense_bytes), int(missing)) for candidate, missing in excess],
    )


def _by_speed(measured: Measurements, unordered: Sequence[Candidate]) -> list[Candidate]:
    remaining = sorted(
        unordered, key=lambda candidate: (candidate.prediction.step_seconds, _complexity(measured, candidate))
    )
    result = []
    while remaining:
        limit = remaining[0].prediction.step_seconds * (1 + TIE)
        tied = [candidate for candidate in remaining if candidate.prediction.step_seconds <= limit]
        chosen = min(tied, key=lambda candidate: (_complexity(measured, candidate), candidate.prediction.step_seconds))
        result.append(chosen)
        remaining.remove(chosen)
    return result


def _complexity(measured: Measurements, candidate: Candidate) -> tuple[bool, bool, int, float]:
    return (
        candidate.is_local,
        candidate.method != DENSE,
        candidate.complexity,
        gradient_error(measured, candidate.method, candidate.workers),
    )


def _plan(measured: Measurements, candidate: Candidate, dense_bytes: float) -> Plan:
    predicted, program = candidate.prediction, measured.program
    # Without this line, "auto" may compile what was measured without.
    says_compiled = True in measured_compilations(program) and candidate.strategy.name == "MultiWorkerMirroredStrategy"
    return Plan(
        strategy=candidate.strategy,
        compression=None if candidate.method == DENSE else candidate.method,
        jit_compile=candidate.compiled,
        exact=candidate.method == DENSE and not candidate.is_local,
        workers=candidate.workers,
        parameter_servers=candidate.servers,
        has_chief=candidate.has_chief,
        step_seconds=predicted.step_seconds,
        samples_per_second=program.rows / predicted.step_seconds,
        memory_bytes=int(predicted.memory_bytes),
        wire_bytes=int(predicted.wire_bytes),
        accuracy=accuracy_of(measured, candidate),
        reason=reason_of(candidate, dense_bytes),
        code=code_of(
            candidate.strategy,
            jit_compile=candidate.compiled if says_compiled else None,
            accumulated=candidate.accumulated,
        ),
        gradient_accumulation_steps=candidate.accumulated,
    )


_BUSY = 0.6  # the part of a step from which something is what bounds it


def gradient_error(measured: Measurements, method: str, workers: int) -> float:
    """Returns by how much a first gradient of a method is off, as a part of the gradient."""
    return 0.0 if method == DENSE else exchange_of(measured.program, method, max(workers, 2)).gradient_error


def accuracy_of(measured: Measurements, candidate: Candidate) -> str:
    """Returns the price in exactness."""
    prices = []
    if candidate.method != DENSE:
        exchange = exchange_of(measured.program, candidate.method, max(candidate.workers, 2))
        prices.append(
            f"{_what_is_sent(candidate)} off by {100 * exchange.gradient_error:.2g} %"
            + (" at first; what is left out is added to the next ones" if exchange.state_bytes else "")
        )
    mode = candidate.strategy.arguments.get("mode")
    if candidate.accumulated > 1:
        prices.append(
            f"an update for {candidate.accumulated} batches, as if batches were {candidate.accumulated} times as large"
        )
    elif candidate.strategy.name == "ParameterServerStrategy" and candidate.is_local:
        prices.append(f"gradients are up to about {candidate.workers - 1} updates old, and each run differs")
    elif isinstance(mode, dict) and "sync_every" in mode["arguments"]:
        prices.append(f"workers train apart for {mode['arguments']['sync_every']} updates, on their own parts")
    return "; ".join(prices) or "exact: the numbers of one process, up to rounding"


def reason_of(candidate: Candidate, dense_bytes: float) -> str:
    """Returns what bounds the step, and what the plan does about it."""
    predicted = candidate.prediction
    step = predicted.step_seconds
    if candidate.workers == 1:
        return f"one worker computes {format_seconds(predicted.compute_seconds)} and sends nothing"
    if predicted.link_seconds > _BUSY * step:
        bound = f"the link is busy {_of(predicted.link_seconds, step)}"
    elif predicted.compute_seconds > _BUSY * step:
        bound = f"computation takes {_of(predicted.compute_seconds, step)}"
    elif predicted.exchange_seconds > max(predicted.compute_seconds, predicted.link_seconds):
        bound = f"encoding and copies take the cores {_of(predicted.exchange_seconds, step)}"
    else:
        bound = (
            f"of {format_seconds(step)} computation takes {format_seconds(predicted.compute_seconds)}, the exchange "
            f"{format_seconds(predicted.exchange_seconds)} of the cores and {format_seconds(predicted.link_seconds)} "
            "of the link; the rest are latencies"
        )
    means = _means(candidate, dense_bytes)
    return f"{bound}; {means}" if means else bound


def _means(candidate: Candidate, dense_bytes: float) -> str:
    """Returns what the plan changes."""
    arguments, predicted = candidate.strategy.arguments, candidate.prediction
    means = []
    if candidate.strategy.name == "ModelParallelStrategy":
        pipeline = arguments["pipeline"]["arguments"]
        stages, parts = pipeline["stages"], pipeline["micro_batches"]
        if stages > 1:
            means.append(f"stages wait {100 * bubble(stages, parts):.0f} % of it for others")
        if "layout_map" in arguments:
            means.append("layers are split, as far as auto_layout can")
    elif candidate.strategy.name == "ParameterServerStrategy":
        means.append(f"each worker pulls all weights, and sends {format_bytes(predicted.wire_bytes)}")
    if candidate.method != DENSE or candidate.is_local or "shard_optimizer_state" in arguments:
        if 0 < predicted.wire_bytes < dense_bytes:
            means.append(f"sends {_part(dense_bytes / predicted.wire_bytes)} of the dense gradients")
    if "shard_optimizer_state" in arguments:
        means.append(f"a worker holds 1/{candidate.workers} of the slots")
    if arguments.get("micro_batches", 1) > 1:
        means.append(f"activations of 1/{arguments['micro_batches']} of the rows at a time")
    if "bucket_bytes" in arguments:
        means.append("one message instead of one for each bucket")
    if "load_balancing" in arguments:
        means.append("rows follow the speeds of the workers")
    if candidate.compiled:
        means.append("XLA compiles the layers")
    return "; ".join(means)


def _what_is_sent(candidate: Candidate) -> str:
    is_difference = (
        candidate.is_local and candidate.strategy.name == "MultiWorkerMirroredStrategy" and candidate.accumulated == 1
    )
    return "differences of weights are" if is_difference else "gradients are"


def _of(part: float, step: float) -> str:
    return f"{format_seconds(min(part, step))} of {format_seconds(step)}"


def _part(ratio: float) -> str:
    return f"1/{ratio:.1f}" if ratio < 10 else f"1/{ratio:.0f}"
