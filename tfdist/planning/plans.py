"""A plan: a strategy with its arguments and what is predicted of it; files of plans, and which of them a run uses."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.utils.formatting import counted

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class PlannedStrategy:
    """The class of a strategy and its arguments.

    Attributes:
        name: A class of `tfdist.strategies`: "MultiWorkerMirroredStrategy", "ParameterServerStrategy",
            "ModelParallelStrategy" or "MirroredStrategy".
        arguments: By name: numbers, strings, or for objects `{"class": "DiLoCo", "arguments": {...}}`, whose class is
            one of `tfdist.strategies`.
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def planned_object(name: str, **arguments: Any) -> dict[str, Any]:
    """Returns an argument that is an object of `tfdist.strategies`; see `PlannedStrategy.arguments`.

    >>> planned_object("LocalSGD", sync_every=20)
    {'class': 'LocalSGD', 'arguments': {'sync_every': 20}}
    """
    return {"class": name, "arguments": arguments}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to train a program on a number of workers.

    Attributes:
        strategy: What `tfdist.strategies.planned()` creates.
        compression: The value of `compression=`; None: none.
        jit_compile: The value for `Model.compile`.
        exact: Whether the numbers are those of one process up to rounding.
        workers: The number of workers.
        parameter_servers: The number of parameter servers.
        has_chief: Whether a chief drives the workers (`tfdist run --chief`).
        step_seconds: Predicted mean time of a step of the global batch.
        samples_per_second: Samples of the global batch divided by `step_seconds`.
        memory_bytes: Predicted largest resident memory of a worker.
        wire_bytes: What a worker sends in a step.
        accuracy: The price in exactness in words: "exact", or how far a gradient is off.
        reason: Why the plan stands where it stands.
        code: The line of the script, and of `compile` if XLA is used, that gives it.
        gradient_accumulation_steps: The number of batches of an update.
    """

    strategy: PlannedStrategy
    compression: str | None
    jit_compile: bool
    exact: bool
    workers: int
    parameter_servers: int
    has_chief: bool
    step_seconds: float
    samples_per_second: float
    memory_bytes: int
    wire_bytes: int
    accuracy: str
    reason: str
    code: str
    gradient_accumulation_steps: int = 1


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """What `tfdist plan --json` writes: `plans`, best first for each number of workers, and what they follow from."""

    plans: Sequence[Plan]  # all that fit into memory
    too_large: Sequence[tuple[Plan, int]]  # plans that do not fit, with the missing bytes
    measurements: Mapping[str, Any]  # the JSON object of `Measurements`
    link: Mapping[str, float]  # `{"bytes_per_second": ..., "latency_seconds": ...}`
    # the JSON object of a `Simulation`, or None. It has its plans, so that nobody starts them by mistake; `plans` is
    # empty then, and `link` is that of a host.
    simulation: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def read(cls, path: Path) -> "PlanFile":
        """Reads a file of `tfdist plan --json`; raises a ValueError for any other."""
        try:
            document = json.loads(path.read_text())
            if document.pop("format") != FORMAT:
                raise ValueError("another format")
            plans = [_plan(plan_document) for plan_document in document["plans"]]
            too_large = [(_plan(plan_document), missing) for plan_document, missing in document["too_large"]]
            return cls(plans, too_large, document["measurements"], document["link"], document.get("simulation"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"The plan cannot be read. Received: {path} ({error!r}). Expected: a file that `tfdist plan --json "
                "FILE train.py` of this version has written. Write it again."
            ) from error


def _plan(document: Mapping[str, Any]) -> Plan:
    return Plan(**{**document, "strategy": PlannedStrategy(**document["strategy"])})


PLAN_VARIABLE = "TFDIST_PLAN"
"""The path of the plan file that `tfdist.strategies.planned()` reads, set by `tfdist run --plan`."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run."""

    workers: int
    parameter_servers: int = 0  # the number of parameter servers, which imply a chief
    has_chief: bool = False  # whether a chief drives the workers without parameter servers

    @classmethod
    def of(cls, plan: Plan) -> "Processes":
        return cls(plan.workers, plan.parameter_servers, plan.has_chief and not plan.parameter_servers)

    def __str__(self) -> str:
        """Describes them.

        >>> str(Processes(2)), str(Processes(2, 1)), str(Processes(1, 0, True))
        ('2 workers', '2 workers with 1 parameter server', '1 worker with a chief')
        """
        workers = counted(self.workers, "worker")
        if self.parameter_servers:
            return f"{workers} with {counted(self.parameter_servers, 'parameter server')}"
        return f"{workers} with a chief" if self.has_chief else workers


def best_plan(file: PlanFile, *, workers: int | None = None, with_servers: bool = True) -> Plan | None:
    """Returns the plan that a new run uses; None if there is none.

    Plans with a `layout_map` are left out: it is made for a built model, which a new run does not have. Without
    `workers` it is that of the number whose best plan trains the most samples in a second.
    """
    firsts: dict[int, Plan] = {}
    for plan in _usable(file):
        if with_servers or not plan.parameter_servers:
            firsts.setdefault(plan.workers, plan)
    if workers is not None:
        return firsts.get(workers)
    return max(firsts.values(), key=lambda plan: plan.samples_per_second, default=None)


def plan_for(file: PlanFile, processes: Iterable[Processes]) -> Plan | None:
    """Returns the first plan for one of these processes, or None. Plans with a `layout_map` are left out."""
    wanted = set(processes)
    return next((plan for plan in _usable(file) if Processes.of(plan) in wanted), None)


def describe_processes(file: PlanFile) -> str:
    """Names the processes for which there are plans that a new run can use."""
    return "; ".join(dict.fromkeys(str(Processes.of(plan)) for plan in _usable(file))) or "no plan at all"


def _usable(file: PlanFile) -> list[Plan]:
    return [plan for plan in file.plans if plan.strategy.arguments.get("layout_map") is None]
