"""What is predicted of a program on numbers of workers that nobody has: steps, efficiency, failures, money.

Plans are searched for each number of workers as for one that exists, with the links of a topology. The fastest plan of
each kind that fits into memory is kept.

Sources of what failures leave: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006,
"A higher order estimate of the optimum checkpoint interval for restart dumps".
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import Measurements
from tfdist.planning.plans import Plan
from tfdist.planning.topology import Topology

WEAK, STRONG = "weak", "strong"
STAGES = "stages"
FindPlans = Callable[[Measurements, LinkSpeed, int], Sequence[Plan]]
_SECONDS_PER_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class FailureCosts:
    """What saves and restarts cost, and how often tasks fail."""

    task_mtbf_seconds: float  # the mean time between two failures of one task
    save_seconds: float  # how long a save delays the training
    restart_seconds: float  # from a failure to the next step, without the steps that are computed again

    def mtbf_seconds(self, tasks: int) -> float:
        """Returns the mean time between two failures of any of `tasks` tasks, each of which ends an attempt.

        >>> FailureCosts(3600.0, 1.0, 10.0).mtbf_seconds(4)
        900.0
        """
        return self.task_mtbf_seconds / tasks


def best_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Returns the time of training between two saves that loses the least (Daly 2006, equation 37).

    If saves are short against the mean time between failures, this is Young's `sqrt(2 · save · mtbf)`.

    >>> round(best_interval_seconds(1.0, 5000.0), 1), best_interval_seconds(3.0, 1.0)
    (99.3, 1.0)
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = math.sqrt(save_seconds / (2 * mtbf_seconds))
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + ratio / 3 + ratio**2 / 9) - save_seconds


def goodput(interval_seconds: float, costs: FailureCosts, tasks: int) -> float:
    """Returns the part of the time in which steps are computed that count (Daly 2006, equation 20).

    Failures are exponentially distributed, and may hit saves and restarts.

    >>> round(goodput(100.0, FailureCosts(5000.0, 1.0, 10.0), 1), 4)
    0.9782
    >>> goodput(100.0, FailureCosts(50.0, 1.0, 10.0), 100) < 1e-6
    True
    """
    mtbf = costs.mtbf_seconds(tasks)
    exponent = (interval_seconds + costs.save_seconds) / mtbf
    # Beyond 709 the exponential is larger than any float, and raises OverflowError.
    if exponent > 700 or costs.restart_seconds / mtbf > 700:
        return 0.0
    total = mtbf * math.exp(costs.restart_seconds / mtbf) * math.expm1(exponent)
    return interval_seconds / total


@dataclasses.dataclass(frozen=True)
class SimulatedCluster:
    """The clusters that are simulated."""

    workers: Sequence[int]  # their numbers of workers
    topology: Topology  # their network
    # `WEAK`: each worker computes as many samples as the program's batch has, so the global batch grows with the
    # workers. `STRONG`: the workers divide the program's batch.
    scaling: str = WEAK
    # whether each worker reads only its part of the data; otherwise it reads all and keeps a part
    files_are_sharded: bool = False
    failures: FailureCosts | None = None  # what failures and saves cost; None: nothing fails
    price_per_hour: float | None = None  # the price of a host with one worker, in any currency; None: unknown


@dataclasses.dataclass(frozen=True)
class SimulatedPoint:
    """A plan on a number of workers."""

    kind: str  # the kind of the plan, of which it is the fastest one
    workers: int
    plan: Plan
    samples: int  # samples of a global batch
    samples_per_second: float  # without failures
    efficiency: float  # `samples_per_second` divided by that of as many workers that do not wait for each other
    data_seconds: float  # time in which a worker, or the chief of stages, reads the data of a step
    straggler_seconds: float  # part of a step in which the mean worker waits because times of steps vary
    exists: bool  # whether the topology has as many hosts
    checkpoint_seconds: float | None  # best time between two saves; None: nothing fails
    goodput: float  # part of the time in which steps are computed that count
    cost_per_million_samples: float | None  # price, with failures; None: unknown


@dataclasses.dataclass(frozen=True)
class Simulation:
    """All points, by kind and number of workers, and what they were simulated for."""

    cluster: SimulatedCluster  # the clusters
    points: Sequence[SimulatedPoint]  # kinds in the order of their efficiency on the fewest workers
    samples_of_epoch: int | None  # samples of an epoch; None: unknown
    left_out: Sequence[int]  # numbers of workers for which there is no plan

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(point.kind for point in self.points))

    def of_kind(self, kind: str) -> list[SimulatedPoint]:
        """Returns the points of a kind, by the number of workers."""
        return [point for point in self.points if point.kind == kind]

    def best(self) -> list[SimulatedPoint]:
        """Returns the fastest point of each number of workers."""
        by_workers: dict[int, list[SimulatedPoint]] = {}
        for point in self.points:
            by_workers.setdefault(point.workers, []).append(point)
        return [max(by_workers[number], key=lambda point: point.samples_per_second) for number in sorted(by_workers)]

    def to_json(self) -> dict[str, Any]:
        document = dataclasses.asdict(self)
        document["cluster"]["topology"] = self.cluster.topology.text
        for point in document["points"]:
            cost, epoch = point["cost_per_million_samples"], self.samples_of_epoch
            point["cost_per_epoch"] = None if cost is None or epoch is None else cost * epoch / 1e6
        return document


def simulate(measured: Measurements, cluster: SimulatedCluster, find_plans: FindPlans) -> Simulation:
    """Simulates a program on clusters."""
    alone = _fastest(find_plans(measured, cluster.topology.link(1), 1))
    samples_of_one = max((plan.samples_per_second for plan in alone.values()), default=0.0)
    points: list[SimulatedPoint] = []
    left_out = []
    for workers in cluster.workers:
        new_points = list(_points(measured, cluster, find_plans, workers, samples_of_one))
        points += new_points
        if not new_points:
            left_out.append(workers)
    firsts: dict[str, float] = {}
    for point in points:
        firsts.setdefault(point.kind, point.efficiency)
    order = sorted(firsts, key=lambda kind: -firsts[kind])
    points.sort(key=lambda point: (order.index(point.kind), point.workers))
    return Simulation(cluster, points, measured.program.samples, left_out)


def program_of(measured: Measurements, cluster: SimulatedCluster, workers: int) -> Measurements:
    """Returns the measurements with the global batch of a number of workers, and the time to read it."""
    program = measured.program
    batches = workers if cluster.scaling == WEAK else 1
    seconds = program.data_seconds * batches / (workers if cluster.files_are_sharded else 1)
    program = dataclasses.replace(program, rows=program.rows * batches, data_seconds=seconds)
    return dataclasses.replace(measured, program=program)


def kind_of(plan: Plan) -> str | None:
    """Returns the kind of a plan; None: it is not simulated, as servers would need hosts and links of the topology."""
    arguments: Mapping[str, Any] = plan.strategy.arguments
    if plan.parameter_servers:
        return None
    if plan.strategy.name == "ModelParallelStrategy":
        return STAGES
    if plan.gradient_accumulation_steps > 1:
        return "accumulated"
    if "mode" in arguments:
        return "local updates"
    if arguments.get("shard_optimizer_state"):
        return "sharded state"
    return "compressed" if plan.compression else "uncompressed"


def _points(
    measured: Measurements, cluster: SimulatedCluster, find_plans: FindPlans, workers: int, samples_of_one: float
) -> Iterator[SimulatedPoint]:
    program = program_of(measured, cluster, workers)
    rows = program.program.rows
    if rows < workers:
        return
    link = cluster.topology.link(workers)
    steady = {_identity(plan): plan for plan in find_plans(_without_deviations(program), link, workers)}
    hosts = cluster.topology.hosts
    for kind, plan in _fastest(find_plans(program, link, workers)).items():
        interval, part = _failures(cluster.failures, workers, plan.step_seconds)
        cost = None
        if cluster.price_per_hour is not None and part > 0:
            hours = 1e6 / (plan.samples_per_second * part) / _SECONDS_PER_HOUR
            cost = hours * workers * cluster.price_per_hour
        calm = steady.get(_identity(plan), plan)
        yield SimulatedPoint(
            kind,
            workers,
            plan,
            rows,
            plan.samples_per_second,
            plan.samples_per_second / (workers * samples_of_one) if samples_of_one else 0.0,
            program.program.data_seconds,
            max(plan.step_seconds - calm.step_seconds, 0.0),
            hosts is None or workers <= hosts,
            interval,
            part,
            cost,
        )


def _failures(costs: FailureCosts | None, workers: int, step_seconds: float) -> tuple[float | None, float]:
    """Returns the best time between two saves, at least that of a step, and the goodput."""
    if costs is None:
        return None, 1.0
    interval = max(best_interval_seconds(costs.save_seconds, costs.mtbf_seconds(workers)), step_seconds)
    return interval, goodput(interval, costs, workers)


def _fastest(plans: Sequence[Plan]) -> dict[str, Plan]:
    fastest: dict[str, Plan] = {}
    for plan in plans:
        kind = kind_of(plan)
        if kind and (kind not in fastest or plan.samples_per_second > fastest[kind].samples_per_second):
            fastest[kind] = plan
    # How long the chief of stages takes to start the parts of all workers is not measured. With many workers that time
    # decides, so stages are not compared with plans that have no chief.
    return {kind: plan for kind, plan in fastest.items() if kind != STAGES or len(fastest) == 1}


def _identity(plan: Plan) -> tuple[str, str | None, bool]:
    return plan.code, plan.compression, plan.jit_compile


def _without_deviations(measured: Measurements) -> Measurements:
    steps = tuple(dataclasses.replace(step, deviation_seconds=0.0) for step in measured.program.steps)
    return dataclasses.replace(measured, program=dataclasses.replace(measured.program, steps=steps))
