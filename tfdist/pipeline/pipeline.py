"""Pipeline: the options of pipeline parallelism, and the order in which stages compute, as a function and a picture."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tfdist.utils.argument_checks import check_whole_number

SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Pipeline:
    """How a model is cut into stages, and in which order these compute the micro-batches of a batch.

    Attributes:
        stages: The number of parts of the model. Each of them runs on a separate device.
        micro_batches: The number of parts of a batch. More of them shorten the bubble, the time in which a device
            waits for others: it takes `(stages - 1) / (micro_batches + stages - 1)` of a step.
        schedule: "1f1b" (Narayanan et al. 2019, "PipeDream"; here with a flush after each batch): stage s computes
            `stages - s` micro-batches forward and then one backward and one forward in turn, so it holds the
            activations of `stages - s` micro-batches. "gpipe" (Huang et al. 2019, "GPipe"): all forward, then all
            backward; holds the activations of all micro-batches.
        cuts: The names of the first layers of stages 1, 2 and so on. By default the parts have similar cost.
        costs: By the name of a layer the cost of a call of it, in any unit, such as the seconds that
            `strategy.measure_costs` returns; other layers cost nothing. By default costs are estimated.

    >>> Pipeline(stages=4, micro_batches=8).bubble_fraction
    0.2727...
    """

    stages: int
    micro_batches: int = 4
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    cuts: Sequence[str] | None = None
    costs: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        check_whole_number("stages", self.stages, at_least=1)
        check_whole_number("micro_batches", self.micro_batches, at_least=1)
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"Invalid `schedule` of a pipeline. Received: schedule={self.schedule!r}. Expected: '1f1b' or 'gpipe'."
            )
        if self.costs is not None and not (
            isinstance(self.costs, Mapping) and all(0 <= cost < math.inf for cost in self.costs.values())
        ):
            raise ValueError(
                f"Invalid `costs` of a pipeline. Received: costs={self.costs!r}. Expected: a dict of numbers from 0 on "
                "by the names of layers; or None."
            )
        if self.cuts is None:
            return
        is_names = not isinstance(self.cuts, str) and all(isinstance(name, str) for name in self.cuts)
        if not is_names or len(self.cuts) != self.stages - 1:
            raise ValueError(
                f"Invalid `cuts` of a pipeline. Received: cuts={self.cuts!r} with stages={self.stages}. Expected: "
                f"the names of the first layers of stages 1 to {self.stages - 1}, {self.stages - 1} in total; or None."
            )

    @property
    def bubble_fraction(self) -> float:
        """The fraction of a step in which a stage waits, if all stages take the same time."""
        return (self.stages - 1) / (self.micro_batches + self.stages - 1)


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
    """Returns the tasks of all stages, by stage in their order, so that each follows those whose results it needs.

    A forward pass needs that of the same micro-batch in the stage before, a backward pass needs its own forward pass
    and the backward pass in the stage after.

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

    A picture that does not fit into `width` characters shows the beginning of the step.

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
        cells = "".join(entry.ljust(cell) for entry in row[:shown])
        yield f"{head.ljust(len(heads[-1]))}{cells if shown == slots else cells + '...'}".rstrip()
    if shown < slots:
        yield f"the first {shown} of {slots} slots of time"


def _slots(task: Task) -> int:
    return 1 if task.is_forward else _SLOTS_OF_BACKWARD
