"""Shows the schedule of a training step as text: which stage computes which micro-batch at what time."""

from collections.abc import Iterator

from tfdist.model_parallel.pipeline import Pipeline
from tfdist.model_parallel.pipeline_schedule import Task, execution_order, tasks_of_stage

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
