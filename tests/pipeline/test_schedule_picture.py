"""The picture shows each pass at the earliest possible time, within the width of a page."""

import pytest

from tfdist.pipeline.pipeline import Pipeline, schedule_picture, start_times


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 3), (4, 8), (4, 2)])
def test_the_stages_wait_as_long_as_the_formula_says(schedule: str, stages: int, micro_batches: int) -> None:
    pipeline = Pipeline(stages=stages, micro_batches=micro_batches, schedule=schedule)
    begins = start_times(pipeline)
    length = max(begin + (1 if task.is_forward else 2) for task, begin in begins.items())
    assert length == 3 * (micro_batches + stages - 1)
    picture = list(schedule_picture(pipeline))
    waits = sum(line.count(".") for line in picture[1:])
    assert waits / (stages * length) == pytest.approx(pipeline.bubble_fraction)
    for stage, line in enumerate(picture[1:]):
        assert line.startswith(f"stage {stage}")
        for number in range(micro_batches):
            assert line.count(f"F{number}") == line.count(f"B{number}") == 1


@pytest.mark.parametrize(("stages", "micro_batches", "is_complete"), [(4, 4, True), (4, 8, True), (16, 64, False)])
def test_a_picture_fits_on_a_page(stages: int, micro_batches: int, is_complete: bool) -> None:
    picture = list(schedule_picture(Pipeline(stages=stages, micro_batches=micro_batches)))
    assert max(map(len, picture)) <= 100
    assert ("the first" not in picture[-1]) == is_complete
    assert not is_complete or f"B{micro_batches - 1}--" in picture[1].replace(" ", "")


def test_a_long_picture_shows_the_beginning() -> None:
    *rows, last = list(schedule_picture(Pipeline(stages=2, micro_batches=20), width=40))[1:]
    assert all(row.endswith("...") for row in rows) and last == "the first 7 of 63 slots of time"
