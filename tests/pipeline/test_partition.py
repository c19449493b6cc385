import itertools

import numpy as np
import pytest

from tfdist.pipeline.stages import named_starts
from tfdist.utils.balanced_starts import balanced_starts


def test_the_largest_cost_is_the_least_possible() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs = rng.integers(0, 40, rng.integers(3, 9)).tolist()
        stages = int(rng.integers(1, 4))

        def largest(starts: tuple[int, ...], costs: list[int] = costs) -> int:
            return max(sum(costs[a:b]) for a, b in itertools.pairwise([*starts, len(costs)]))

        found = balanced_starts(costs, stages)
        assert found[0] == 0 and len(set(found)) == stages and found == sorted(found)
        options = itertools.combinations(range(1, len(costs)), stages - 1)
        least = min(largest((0, *rest)) for rest in options)
        assert largest(tuple(found)) == least
        sent = rng.integers(0, 9, len(costs)).tolist()
        allowed = [
            sum(sent[start] for start in rest)
            for rest in itertools.combinations(range(1, len(costs)), stages - 1)
            if largest((0, *rest)) <= int(least * 1.05)
        ]
        assert sum(sent[start] for start in balanced_starts(costs, stages, sent)[1:]) == min(allowed)


@pytest.mark.parametrize(("cuts", "message"), [(["d"], "does not have"), (["c", "b"], "order"), (["a"], "empty")])
def test_wrong_cuts_are_rejected(cuts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.* Received: .*Expected: "):
        named_starts(["a", "b", "c"], cuts)


def test_cuts_name_layers_of_nested_models() -> None:
    names = ["in", "net/a", "net/deep/b", "net/c", "tower/a", "net/c", "b"]
    assert named_starts(names, ["net", "deep", "c", "tower"]) == [0, 1, 2, 3, 4]
    assert named_starts(names, ["net/deep/b", "b"]) == [0, 2, 6]
    with pytest.raises(ValueError, match=r"several layers.* Received: 'a'. Expected: .*net/a', 'tower/a'"):
        named_starts(names, ["a"])
