"""Which plan of a file a run uses: the best one for its workers, parameter servers and chief."""

import dataclasses
from collections.abc import Iterable

from tfdist.planning.plans import Plan, PlanFile
from tfdist.utils.formatting import counted

PLAN_VARIABLE = "TFDIST_PLAN"
"""The path of the plan file that `tfdist.strategies.planned()` reads, set by `tfdist run --plan`."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        workers: The number of workers.
        parameter_servers: The number of parameter servers, which imply a chief.
        has_chief: Whether a chief drives the workers without parameter servers.
    """

    workers: int
    parameter_servers: int = 0
    has_chief: bool = False

    @classmethod
    def of(cls, plan: Plan) -> "Processes":
        """Returns the processes that a plan needs."""
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

    Plans with a `layout_map` are left out: it is made for a built model, which a new run does not have.

    Args:
        file: Its plans are in their order for each number of workers.
        workers: The number of workers. None: the one whose best plan trains the most samples in a second.
        with_servers: Whether the run may have parameter servers.
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
