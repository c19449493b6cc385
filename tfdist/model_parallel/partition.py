"""Cuts a sequence of layers into contiguous stages with the least largest cost; pure functions."""

from collections.abc import Sequence


def balanced_starts(costs: Sequence[int], stages: int) -> list[int]:
    """Returns where stages begin so that the largest sum of costs of a stage is as small as possible.

    Args:
        costs: By position, at least 0.
        stages: The number of contiguous parts; none is empty.

    Returns:
        `stages` positions, the first of them 0.

    Raises:
        ValueError: There are fewer costs than stages.

    >>> balanced_starts([5, 1, 1, 1, 4, 4], 3)
    [0, 2, 5]
    >>> balanced_starts([0, 0, 9], 3)
    [0, 1, 2]
    """
    if stages > len(costs):
        raise ValueError("fewer costs than stages")
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(_greedy_starts(costs, middle)) <= stages:
            high = middle
        else:
            low = middle + 1
    return _split_further(_greedy_starts(costs, low), len(costs), stages)


def _greedy_starts(costs: Sequence[int], capacity: int) -> list[int]:
    """The starts of parts that each take as much as fits into `capacity`."""
    starts, used = [0], 0
    for position, cost in enumerate(costs):
        if used + cost > capacity:
            starts.append(position)
            used = 0
        used += cost
    return starts


def _split_further(starts: list[int], positions: int, stages: int) -> list[int]:
    """Splits parts, the last ones first, until there are `stages` of them."""
    chosen = set(starts)
    free = (position for position in range(positions - 1, 0, -1) if position not in chosen)
    while len(chosen) < stages:
        chosen.add(next(free))
    return sorted(chosen)


def named_starts(names: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """Returns where stages begin whose first layers the user has named.

    Args:
        names: By position, the name of the layer.
        cuts: The names of the first layers of stages 1 and following.

    Raises:
        ValueError: A name is unknown, or the order differs from that of the layers.

    >>> named_starts(["a", "b", "c"], ["c"])
    [0, 2]
    """
    unknown = [name for name in cuts if name not in names]
    if unknown:
        raise ValueError(
            f"A cut names a layer that the model does not have. Received: {unknown}. Expected: names among "
            f"{list(dict.fromkeys(names))}. Layers inside of another layer or model cannot begin a stage."
        )
    starts = [0, *(names.index(name) for name in cuts)]
    if any(after <= before for before, after in zip(starts, starts[1:], strict=False)):
        raise ValueError(
            f"The cuts are not in the order of the layers, or leave a stage empty. Received: cuts={list(cuts)}, at the "
            f"positions {starts[1:]}. Expected: increasing positions from 1, in the order {list(dict.fromkeys(names))}."
        )
    return starts
