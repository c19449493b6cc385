"""The order in which stages compute micro-batches forward and backward, as pure functions and as a picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfdist.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Task:
    """The forward or the backward pass of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    is_forward: bool

    def __str__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.micro_batch}"


def tasks_of_stage(schedule: str, stage: int, stages: int, micro_batches: int, *, training: bool = True) -> list[Task]:
    """Returns the tasks of a stage in their order.

    >>> " ".join(map(str, tasks_of_stage("1f1b", 0, 2, 4)))
    'F0 F1 B0 F2 B1 F3 B2 B3'
    >>> " ".join(map(str, tasks_of_stage("1f1b", 1, 2, 4)))
    'F0 B0 F1 B1 F2 B2 F3 B3'
    >>> " ".join(map(str, tasks_of_stage("gpipe", 0, 2, 2)))
    'F0 F1 B0 B1'
    """
    forward = [Task(stage, number, True) for number in range(micro_batches)]
    if not training:
        return forward
    backward = [Task(stage, number, False) for number in range(micro_batches)]
    held = most_held(schedule, stage, stages, micro_batches)
    order = forward[:held]
    for number in range(micro_batches):
        order += [backward[number], *forward[held + number : held + number + 1]]
    return order


def most_held(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Returns the largest number of micro-batches whose activations a stage holds at a time.

    >>> [most_held("1f1b", stage, 4, 8) for stage in range(4)], most_held("gpipe", 0, 4, 8)
    ([4, 3, 2, 1], 8)
    """
    return micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)


def execution_order(orders: Sequence[Sequence[Task]]) -> list[Task]:
    """Returns the tasks of all stages so that each follows those whose results it needs.

    A forward pass needs that of the same micro-batch in the stage before, a backward pass needs its own forward pass
    and the backward pass in the stage after.

    Args:
        orders: By stage, its tasks in their order.

    >>> orders = [tasks_of_stage("1f1b", stage, 2, 2) for stage in range(2)]
    >>> [(task.stage, str(task)) for task in execution_order(orders)]
    [(0, 'F0'), (0, 'F1'), (1, 'F0'), (1, 'B0'), (1, 'F1'), (1, 'B1'), (0, 'B0'), (0, 'B1')]
    """
    last = len(orders) - 1
    done: set[Task] = set()
    waiting = [list(order) for order in orders]
    result: list[Task] = []

    def is_ready(task: Task) -> bool:
        if task.is_forward:
            return task.stage == 0 or Task(task.stage - 1, task.micro_batch, True) in done
        return task.stage == last or Task(task.stage + 1, task.micro_batch, False) in done

    while any(waiting):
        before = len(result)
        for tasks in waiting:
            while tasks and is_ready(tasks[0]):
                done.add(tasks[0])
                result.append(tasks.pop(0))
        if len(result) == before:
            raise AssertionError(f"these orders wait for each other: {orders}")
    return result


_SLOTS_OF_BACKWARD = 2  # a backward pass computes the gradients of the inputs and of the weights


def start_times(pipeline: Pipeline) -> dict[Task, int]:
    """Returns when each task begins, in slots of a forward pass, if all stages take the same time.

    >>> times = start_times(Pipeline(stages=2, micro_batches=2))
    >>> [(task.stage, str(task), time) for task, time in times.items()][:4]
    [(0, 'F0', 0), (0, 'F1', 1), (1, 'F0', 1), (1, 'B0', 2)]
    """
    stages, count = pipeline.stages, pipeline.micro_batches
    begins: dict[Task, int] = {}
    free = [0] * stages
    for task in execution_order([tasks_of_stage(pipeline.schedule, stage, stages, count) for stage in range(stages)]):
        before = Task(task.stage + (-1 if task.is_forward else 1), task.micro_batch, task.is_forward)
        begins[task] = max(free[task.stage], begins[before] + _slots(before) if before in begins else 0)
        free[task.stage] = begins[task] + _slots(task)
    return begins


def schedule_picture(pipeline: Pipeline, width: int = 100) -> Iterator[str]:
    r"""Yields the lines of a picture with a row for each stage, and time from left to right.

    Args:
        pipeline: The options of the pipeline.
        width: The largest number of characters of a line. A picture that does not fit shows the beginning of the step.

    >>> print("\n".join(schedule_picture(Pipeline(stages=2, micro_batches=3))))
    F0: micro-batch 0 forward, B0: backward, taken as twice as long, '.': the stage waits
    stage 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
    stage 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .
    """
    begins = start_times(pipeline)
    slots = max(begin + _slots(task) for task, begin in begins.items())
    size = len(f"F{pipeline.micro_batches - 1}")
    heads = [f"stage {stage}  " for stage in range(pipeline.stages)]
    room = width - len(heads[-1])
    # Without spaces between the passes, if only then the complete step fits.
    cell = size + 1 if slots * (size + 1) - 1 <= room or slots * size > room else size
    shown = slots if slots * cell - 1 <= room else (room - len("...")) // cell
    rows = [["."] * slots for _ in heads]
    for task, begin in begins.items():
        rows[task.stage][begin : begin + _slots(task)] = [str(task), *["-" * size] * (_slots(task) - 1)]
    yield "F0: micro-batch 0 forward, B0: backward, taken as twice as long, '.': the stage waits"
    for head, row in zip(heads, rows, strict=True):
        cells = "".join(one.ljust(cell) for one in row[:shown])
        yield f"{head.ljust(len(heads[-1]))}{cells if shown == slots else cells + '...'}".rstrip()
    if shown < slots:
        yield f"the first {shown} of {slots} slots of time"


def _slots(task: Task) -> int:
    return 1 if task.is_forward else _SLOTS_OF_BACKWARD
