"""planned: creates the strategy that `tfdist plan` has chosen for this program."""

import dataclasses
import inspect
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist import cluster
from tfdist.load_balancing.share_planning import LoadBalancing
from tfdist.local_updates.local_modes import DiLoCo, LocalSGD
from tfdist.parameter_server.modes import Asynchronous, Synchronous
from tfdist.pipeline.pipeline import Pipeline
from tfdist.planning.plans import PLAN_VARIABLE, Plan, PlanFile, Processes, describe_processes, plan_for
from tfdist.sharded_state.state_sharding import ShardedState
from tfdist.strategies.cluster_resolver import is_started_by_launcher
from tfdist.strategies.mirrored_strategy import MirroredStrategy
from tfdist.strategies.model_parallel_strategy import ModelParallelStrategy
from tfdist.strategies.multi_worker_strategy import MultiWorkerMirroredStrategy
from tfdist.strategies.parameter_server_strategy import ParameterServerStrategy
from tfdist.strategies.worker_start import compare_plans

_PROBE_VARIABLE = "TFDIST_PROBE"  # set while `tfdist plan` measures the program
# The names that a file may contain. Nothing else is looked up.
_STRATEGIES: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (MirroredStrategy, ModelParallelStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy)
}
_OPTIONS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (Asynchronous, DiLoCo, LoadBalancing, LocalSGD, Pipeline, ShardedState, Synchronous)
}
_log = logging.getLogger("tfdist")


def planned(path: str | os.PathLike[str] | None = None) -> Any:
    """Creates the strategy of a plan, in the place where a program otherwise creates a strategy by hand.

    It is the first plan of the file that was made for the workers, parameter servers and chief of this run.
    `tfdist run --plan plan.json train.py` starts these processes; under another launcher set the variable
    `TFDIST_PLAN` to the path of the file in every process. The strategy is created with the arguments of the plan, and
    its attribute `plan` has the predictions. `compile` uses the plan's `jit_compile` unless the program gives another
    value than "auto".

    | environment | strategy |
    |---|---|
    | a plan, and the processes of one of its plans | that of the plan |
    | a plan, and no cluster: `python train.py` | `MultiWorkerMirroredStrategy()` on the devices of this process |
    | a plan, and fewer workers after a failure (`--min-workers`) | the best plan for their number, or with a warning that for all workers, if its arguments fit |
    | no plan | `ParameterServerStrategy()` if there are parameter servers, `ModelParallelStrategy` with a stage for each worker under `tfdist run --chief`, `MultiWorkerMirroredStrategy()` otherwise |
    | `tfdist plan` measures this program | `MultiWorkerMirroredStrategy()` |

    >>> from tfdist.strategies import planned
    >>> strategy = planned()
    >>> type(strategy).__name__, strategy.plan
    ('MultiWorkerMirroredStrategy', None)

    Args:
        path: A file that `tfdist plan --json FILE` has written. By default that of `tfdist run --plan`, or of the
            variable `TFDIST_PLAN`.

    Returns:
        A strategy of `tfdist.strategies`.

    Raises:
        ValueError: The file cannot be read, has no plan for these processes, or has a strategy or an argument that
            this version does not have; or workers have different plans.
    """  # noqa: E501  (rows of a table cannot be split)
    if os.environ.get(_PROBE_VARIABLE, "").strip() == "1":
        return MultiWorkerMirroredStrategy()
    config = cluster.detect()
    plan_path = os.environ.get(PLAN_VARIABLE, "").strip() if path is None else os.fspath(path)
    plan = None
    if plan_path:
        file = PlanFile.read(Path(plan_path))
        plan = None if config is None else _plan_of_cluster(file, plan_path, config)
        strategy = MultiWorkerMirroredStrategy() if plan is None else _create(plan, plan_path)
    else:
        strategy = _without_plan(config)
    strategy.plan = plan
    if plan is not None and plan.gradient_accumulation_steps > 1 and strategy.rank == 0:
        _log.warning(
            "planned: the plan makes one update of %d batches, which the optimizer decides. Create it with "
            "gradient_accumulation_steps=%d.",
            plan.gradient_accumulation_steps,
            plan.gradient_accumulation_steps,
        )
    if isinstance(strategy, MultiWorkerMirroredStrategy) and strategy.num_workers > 1:
        name = f"tfdist/plan/{strategy._collective_key_base}"
        compare_plans(strategy.rank, strategy.num_workers, name, _summary(plan))
    return strategy


def _without_plan(config: cluster.ClusterConfig | None) -> Any:
    jobs: Mapping[str, Any] = {} if config is None else config.cluster.jobs
    if "ps" in jobs:
        return ParameterServerStrategy()
    if "chief" in jobs and is_started_by_launcher():
        return ModelParallelStrategy(pipeline=Pipeline(stages=len(jobs["worker"])))
    return MultiWorkerMirroredStrategy()


def _plan_of_cluster(file: PlanFile, path: str, config: cluster.ClusterConfig) -> Plan:
    """Returns the best plan for the processes of a cluster.

    Raises:
        ValueError: There is none.
    """
    jobs = config.cluster.jobs
    workers, chiefs, servers = (len(jobs.get(job, ())) for job in ("worker", "chief", "ps"))
    present = [Processes(workers, servers, bool(chiefs) and not servers)]
    if chiefs and not servers and not is_started_by_launcher():
        present.append(Processes(workers + chiefs))  # of MultiWorkerMirroredStrategy the chief is a worker, too
    plan = plan_for(file, present)
    if plan is not None:
        return plan
    all_workers = cluster.requested_workers()
    if all_workers is not None and all_workers > workers and not chiefs and not servers:
        plan = plan_for(file, [Processes(all_workers)])
        if plan is not None and _fits_any_number(plan.strategy.arguments):
            if config.task.index == 0:
                _log.warning(
                    "planned: the plan has nothing for the %d workers that are left; its strategy for %d workers is "
                    "used, and its predictions do not apply. Plan for both numbers: tfdist plan --workers %d,%d",
                    workers,
                    all_workers,
                    workers,
                    all_workers,
                )
            return dataclasses.replace(plan, workers=workers, step_seconds=math.nan, samples_per_second=math.nan)
    raise ValueError(
        f"The plan has nothing for the processes of this run. Received: {' or '.join(map(str, present))}, and the plan "
        f"{path} for {describe_processes(file)}. Expected: the processes of one of its plans. Start the script by "
        f"`tfdist run --plan {path}`, which starts them, or plan for this number: `tfdist plan --workers {workers}`."
    )


def _fits_any_number(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments of a strategy have no value for each worker.

    >>> _fits_any_number({"compression": "int8"}), _fits_any_number({"shares": [1, 3]})
    (True, False)
    >>> _fits_any_number({"load_balancing": {"class": "LoadBalancing", "arguments": {"max_share": [0.5, 0.75]}}})
    False
    """
    balancing = arguments.get("load_balancing")
    limits = balancing.get("arguments", {}).get("max_share") if isinstance(balancing, Mapping) else None
    return arguments.get("shares") is None and not isinstance(limits, list)


def _create(plan: Plan, path: str) -> Any:
    """Creates the strategy of a plan.

    Raises:
        ValueError: The class or an argument is unknown, or rejected by the class.
    """
    arguments = dict(plan.strategy.arguments)
    if plan.compression is not None:
        arguments.setdefault("compression", plan.compression)
    return _call(_STRATEGIES, plan.strategy.name, arguments, path)


def _call(known: Mapping[str, Callable[..., Any]], name: Any, arguments: Any, path: str) -> Any:
    kind = known.get(name) if isinstance(name, str) else None
    accepted = None if kind is None else list(inspect.signature(kind).parameters)
    is_mapping = isinstance(arguments, Mapping)
    if kind is None or accepted is None or not is_mapping or (unknown := sorted(set(arguments) - set(accepted))):
        received = (
            f"the class {name!r}" if accepted is None else f"{name} with {unknown if is_mapping else arguments!r}"
        )
        expected = f"one of {', '.join(sorted(known))}" if accepted is None else f"arguments among {accepted}"
        raise ValueError(
            f"The plan has a strategy that this version of tfdist cannot create. Received: {received} in {path}. "
            f"Expected: {expected}. Write the plan again by the `tfdist plan` of this version."
        )
    return kind(**{key: _value(value, path) for key, value in arguments.items()})


def _value(value: Any, path: str) -> Any:
    """Returns the value of an argument: options of `tfdist.strategies` are created, others stay as they are."""
    if isinstance(value, Mapping) and "class" in value and set(value) <= {"class", "arguments"}:
        return _call(_OPTIONS, value["class"], value.get("arguments", {}), path)
    if isinstance(value, list):
        return [_value(item, path) for item in value]
    return value


def _summary(plan: Plan | None) -> str:
    if plan is None:
        return "no plan"
    arguments = {**plan.strategy.arguments, "compression": plan.compression, "jit_compile": plan.jit_compile}
    return f"{plan.strategy.name}({', '.join(f'{name}={value!r}' for name, value in sorted(arguments.items()))})"
