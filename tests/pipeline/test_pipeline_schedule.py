import pytest

from tfdist.pipeline.pipeline import execution_order, most_held, tasks_of_stage


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 8), (4, 2), (3, 3)])
def test_each_micro_batch_passes_each_stage_once(schedule: str, stages: int, micro_batches: int) -> None:
    orders = [tasks_of_stage(schedule, stage, stages, micro_batches) for stage in range(stages)]
    for stage, order in enumerate(orders):
        held = most = 0
        for task in order:
            held += 1 if task.is_forward else -1
            most = max(most, held)
        assert held == 0 and most == most_held(schedule, stage, stages, micro_batches)
    ordered = execution_order(orders)
    assert len(set(ordered)) == len(ordered) == 2 * stages * micro_batches
    position = {task: index for index, task in enumerate(ordered)}
    for order in orders:
        assert [position[task] for task in order] == sorted(position[task] for task in order)
    for task, index in position.items():
        before = type(task)(task.stage + (-1 if task.is_forward else 1), task.micro_batch, task.is_forward)
        assert position.get(before, -1) < index


def test_1f1b_holds_fewer_micro_batches_in_later_stages() -> None:
    assert [most_held("1f1b", stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
