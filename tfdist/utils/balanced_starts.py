"""Cuts a sequence of layers into contiguous stages with the least largest cost; pure functions."""

from collections.abc import Sequence

_SLACK = 0.05  # how much larger than necessary the largest cost may be, to send less


def balanced_starts(costs: Sequence[int], stages: int, sent: Sequence[int] | None = None) -> list[int]:
    """Returns where stages begin so that the largest sum of costs of a stage is as small as possible, the others even.

    The stages are contiguous, and none is empty; the first begins at 0. If it is given how much a cut before each
    position has `sent`, they send as little as possible while the largest cost is at most 5 % above the smallest one.

    >>> balanced_starts([5, 1, 1, 1, 4, 4], 3)
    [0, 2, 5]
    >>> balanced_starts([100, 1, 100], 2, [0, 9, 3])
    [0, 2]
    >>> balanced_starts([0, 2, 2, 2, 2, 2, 2], 4)  # not a stage without cost, and three of 4
    [0, 2, 3, 5]
    """
    if stages > len(costs):
        raise ValueError("fewer costs than stages")
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(costs, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    if sent is None:
        return _cheapest_starts(costs, stages, low, [0] * len(costs))
    return _cheapest_starts(costs, stages, int(low * (1 + _SLACK)), sent)


def _parts_needed(costs: Sequence[int], capacity: int) -> int:
    """Returns the number of parts if each takes as much as fits into `capacity`."""
    parts, used = 1, 0
    for cost in costs:
        if used + cost > capacity:
            parts, used = parts + 1, 0
        used += cost
    return parts


def _cheapest_starts(costs: Sequence[int], stages: int, capacity: int, sent: Sequence[int]) -> list[int]:
    """Returns the cuts that send least among those whose parts fit into `capacity`; of several, the most even ones."""
    # By end of the parts so far: what they send, the sum of the squares of their costs, and where they start.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for stage in range(stages):
        after: dict[int, tuple[int, int, list[int]]] = {}
        for start, (total, squares, starts) in best.items():
            used, total = 0, total + sent[start] * (start > 0)
            for end in range(start + 1, len(costs) - (stages - 1 - stage) + 1):
                used += costs[end - 1]
                if used > capacity:
                    break
                if end not in after or (total, squares + used**2) < after[end][:2]:
                    after[end] = total, squares + used**2, [*starts, start]
        best = after
    return best[len(costs)][2]
