"""Chooses cases of a table of factors, so that any two values of different factors meet in one of them."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], is_allowed: Callable[[Case], bool]) -> list[Case]:
    """All allowed cases."""
    cases = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if is_allowed(case)]


def pairwise(
    factors: Mapping[str, Sequence[Any]], is_allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Allowed cases in which all pairs of values occur that occur in any; always the same, a greedy choice.

    >>> len(pairwise({"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3]}))
    9
    """
    cases = product(factors, is_allowed)
    numbers: dict[Any, int] = {}  # of all pairs: sets of pairs are the bits of integers, which are faster
    pairs = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in _pairs(case)) for case in cases]
    left = (1 << len(numbers)) - 1
    chosen = []
    while left:
        best = max(range(len(cases)), key=lambda index: (pairs[index] & left).bit_count())  # the first of the best
        chosen.append(cases[best])
        left &= ~pairs[best]
    return chosen


def _pairs(case: Case) -> Iterator[tuple[Any, ...]]:
    return itertools.combinations(case.items(), 2)


def case_name(case: Case) -> str:
    """The id of a case in pytest."""
    names = (getattr(value, "__name__", str(value)) for value in case.values())
    return "-".join(name.replace(" ", "_") for name in names)
