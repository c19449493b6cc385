"""The time of a pipeline against its simulation, operation by operation."""

from collections.abc import Sequence

import pytest

from tfdist.planning.predict_model_parallel import pipeline_seconds


def operations(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """The order in which a stage computes by 1F1B."""
    begun = min(stages - stage, micro_batches)
    found = [("forward", index) for index in range(begun)]
    for index in range(micro_batches):
        found.append(("backward", index))
        if begun + index < micro_batches:
            found.append(("forward", begun + index))
    return found


def simulated(stage_seconds: Sequence[float], micro_batches: int, hop: float) -> float:
    """When the last stage has ended, if a backward pass takes as long as a forward pass."""
    stages = len(stage_seconds)
    left = [operations(stage, stages, micro_batches) for stage in range(stages)]
    free = [0.0] * stages
    done: dict[tuple[str, int, int], float] = {}
    while any(left):
        for stage in range(stages):
            while left[stage]:
                kind, index = left[stage][0]
                before = (kind, stage - 1 if kind == "forward" else stage + 1, index)
                if before[1] == -1:  # the first stage has all data
                    ready = 0.0
                elif before[1] == stages:  # the last one has its loss
                    ready = done["forward", stage, index]
                elif before in done:
                    ready = done[before] + hop
                else:
                    break
                free[stage] = max(free[stage], ready) + stage_seconds[stage] / 2
                done[kind, stage, index] = free[stage]
                left[stage].pop(0)
    return max(free)


@pytest.mark.parametrize("hop", [0.0, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("stages", [[1.0, 1.0], [1.0] * 4, [1.0, 2.0], [2.0, 1.0, 0.5], [0.5, 1.0, 1.0, 0.5] * 2])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_pipeline(stages: list[float], micro_batches: int, hop: float) -> None:
    expected = simulated(stages, micro_batches, hop)
    # Micro-batches that have begun fill and empty the pipeline in steps of a round trip, of which the formula has the
    # mean: up to 15 % with few of them.
    assert pipeline_seconds(stages, micro_batches, hop) == pytest.approx(expected, rel=0.2)
