"""Searches the plans for a number of workers: drops what does not fit into memory, and orders the rest."""

from collections.abc import Sequence
from typing import NamedTuple

from tfdist.planning.candidates import Candidate, candidates
from tfdist.planning.conditions import Conditions
from tfdist.planning.measurements import DENSE, Measurements
from tfdist.planning.plan_code import code_of
from tfdist.planning.plan_reasons import accuracy_of, gradient_error, reason_of
from tfdist.planning.plans import Plan
from tfdist.planning.step_costs import is_measured

TIE = 0.05
"""Plans whose predicted times differ by less are equally good: two runs of one benchmark differ by as much."""


class FoundPlans(NamedTuple):
    """The plans for a number of workers.

    Attributes:
        plans: Those that fit, best first.
        too_large: Those that do not, with the missing bytes; the smallest excess first.
    """

    plans: list[Plan]
    too_large: list[tuple[Plan, int]]


def find_plans(measured: Measurements, conditions: Conditions, workers: int) -> FoundPlans:
    """Returns all sensible plans: none if there are more devices than samples in a batch.

    They are ordered by samples in a second. Parameter servers and stages, whose chief's own time is not measured,
    follow all others. Among plans within 5 % of the fastest one that is left, the simplest is first: exact before
    inexact, fewer options before more, then the smaller error of a gradient.

    Args:
        measured: The program and this machine.
        conditions: The workers, and what the user allows.
        workers: Their number.
    """
    found = list(candidates(measured, conditions, workers))
    fitting = [one for one in found if one.prediction.memory_bytes <= conditions.memory_bytes]
    others = [one for one in found if one.prediction.memory_bytes > conditions.memory_bytes]
    dense = [one.prediction.wire_bytes for one in found if one.method == DENSE and one.complexity == 0]
    dense_bytes = max(dense, default=0.0)
    excess = [(one, one.prediction.memory_bytes - conditions.memory_bytes) for one in others]
    excess.sort(key=lambda pair: (pair[1], _complexity(measured, pair[0])))
    return FoundPlans(
        [_plan(measured, one, dense_bytes) for one in ordered(measured, fitting)],
        [(_plan(measured, one, dense_bytes), int(missing)) for one, missing in excess],
    )


def ordered(measured: Measurements, found: Sequence[Candidate]) -> list[Candidate]:
    """Returns the best first; see `find_plans`."""
    measured_whole = [one for one in found if not _has_chief(one)]
    return [
        *_by_speed(measured, measured_whole),
        *_by_speed(measured, [one for one in found if _has_chief(one)]),
    ]


def _by_speed(measured: Measurements, found: Sequence[Candidate]) -> list[Candidate]:
    left = sorted(found, key=lambda one: (one.prediction.step_seconds, _complexity(measured, one)))
    result = []
    while left:
        limit = left[0].prediction.step_seconds * (1 + TIE)
        tied = [one for one in left if one.prediction.step_seconds <= limit]
        chosen = min(tied, key=lambda one: (_complexity(measured, one), one.prediction.step_seconds))
        result.append(chosen)
        left.remove(chosen)
    return result


def _has_chief(one: Candidate) -> bool:
    return one.has_chief or one.servers > 0


def _complexity(measured: Measurements, one: Candidate) -> tuple[bool, bool, int, float]:
    return one.is_local, one.method != DENSE, one.complexity, gradient_error(measured, one.method, one.workers)


def _plan(measured: Measurements, one: Candidate, dense_bytes: float) -> Plan:
    predicted, program = one.prediction, measured.program
    # Without this line, "auto" may compile what was measured without.
    says_compiled = is_measured(program, compiled=True) and one.strategy.name == "MultiWorkerMirroredStrategy"
    return Plan(
        strategy=one.strategy,
        compression=None if one.method == DENSE else one.method,
        jit_compile=one.compiled,
        exact=one.method == DENSE and not one.is_local,
        workers=one.workers,
        parameter_servers=one.servers,
        has_chief=one.has_chief,
        step_seconds=predicted.step_seconds,
        samples_per_second=program.rows / predicted.step_seconds,
        memory_bytes=int(predicted.memory_bytes),
        wire_bytes=int(predicted.wire_bytes),
        accuracy=accuracy_of(measured, one),
        reason=reason_of(measured, one, dense_bytes),
        code=code_of(one.strategy, jit_compile=one.compiled if says_compiled else None, accumulated=one.accumulated),
        gradient_accumulation_steps=one.accumulated,
    )
