"""from_notebook: calls a function of a notebook or a script in several workers."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tfdist.launch.function_call.child_programs import call_directory
from tfdist.launch.function_call.function_pickling import check_function, pickle_call
from tfdist.launch.function_call.launcher_process import LauncherProcess
from tfdist.launch.function_call.worker_results import (
    FAILURE,
    read_failure,
    read_results,
    values_by_rank,
)
from tfdist.launch.notebook.plan_from_notebook import NotebookPlans
from tfdist.launch.run_spec import RunSpec
from tfdist.planning.plans import PlanFile, Processes, best_plan
from tfdist.utils.argument_checks import UsageError

Value = TypeVar("Value")
_NETWORKS = ("auto", "private", "host")


def from_notebook(
    function: Callable[..., Value],
    *args: Any,
    workers: int | None = None,
    plan: NotebookPlans | str | os.PathLike[str] | None = None,
    max_restarts: int = 0,
    threads_per_worker: int | None = None,
    seed: int | None = None,
    network: str = "auto",
    log_dir: str | os.PathLike[str] | None = None,
    grace_seconds: float = 5.0,
) -> list[Value]:
    """Calls a function in several new worker processes and returns its values, by rank.

    It does for a function, such as one of a notebook cell, what `tfdist run` does for a script: it sets `TF_CONFIG`,
    divides the cores among the workers, shows their output behind their rank, and ends all workers when one fails. No
    worker outlives this process. The function creates its strategy, `tfdist.strategies.MultiWorkerMirroredStrategy()`,
    and should do so before anything else. This process may have used TensorFlow already.

    cloudpickle sends the function with its closure and the globals that it names. Changes that a worker makes to them
    stay in the worker. Workers import modules themselves. All workers get the same arguments; pass keyword arguments
    with `functools.partial`.

    An interrupt (of the kernel, or Ctrl-C) ends all workers with SIGTERM, so that `FailureRecovery` can save, and kills
    them after `grace_seconds`. A second interrupt kills them at once.

    >>> from tfdist.launch import from_notebook
    >>> base = 40
    >>> def add(number):
    ...     from tfdist import cluster
    ...     return base + number + cluster.detect().task.index
    >>> from_notebook(add, 1, workers=2)
    [41, 42]

    Args:
        function: Any callable that can be pickled with the objects it uses. Variables, models, datasets and strategies
            cannot be sent: create them in the function.
        *args: Positional arguments of the function.
        workers: Number of workers, all on this host. By default 2, or as many as the best plan of `plan` has.
        plan: What `plan_from_notebook` has returned, or the path of a file of `tfdist plan --json`. The function
            creates its strategy by `tfdist.strategies.planned()`. If the best plan has a chief, that process alone
            calls the function, and the list has one value.
        max_restarts: How often to restart all workers after a failure, and to call the function again. With
            `FailureRecovery` the training resumes from the newest checkpoint.
        threads_per_worker: Threads of each worker. Defaults to the usable cores divided by `workers`.
        seed: Where the random generators of Python, NumPy and TensorFlow start in every worker, and after every
            restart, unless `function` seeds them. By default TFDIST_SEED of this process, else a new one for each call.
        network: "private": only the workers can connect to each other; "host": the network of this host; "auto":
            private where permitted if the plan has a chief, else host.
        log_dir: Directory for the workers' output, in files `rank-<rank>.log`, in addition.
        grace_seconds: Seconds from SIGTERM to SIGKILL when workers are ended.

    Returns:
        The function's return value in each worker, by rank.

    Raises:
        TypeError: If `function` is not callable, or it or an argument cannot be pickled.
        ValueError: If an option is invalid, the plan cannot be read or has none for this number of workers, or this
            process is already a worker.
        tfdist.launch.WorkerError: If a worker failed, with its rank and its traceback. Also if a value cannot be
            pickled.
        ImportError: If cloudpickle is not installed (the extra `notebook`).
        KeyboardInterrupt: If the call was interrupted, after the workers have ended.
    """
    check_function(function, caller="from_notebook")
    spec = RunSpec.of_call(
        workers=2 if workers is None else workers,
        max_restarts=max_restarts,
        threads_per_worker=threads_per_worker,
        seed=seed,
        network=network,
        log_dir=log_dir,
        grace_seconds=grace_seconds,
    )
    if network not in _NETWORKS:
        raise ValueError(f"Invalid `network`. Received: network={network!r}. Expected: one of {_NETWORKS}.")
    with call_directory(pickle_call(function, args)) as (directory, script):
        calls = spec.calls
        spec = dataclasses.replace(spec, error_file=directory / FAILURE)
        by_plan: list[str] = []
        if plan is not None:
            path = directory / "plan.json" if isinstance(plan, NotebookPlans) else Path(plan)
            if isinstance(plan, NotebookPlans):
                plan.save(path)
            calls = _calls_of_plan(path, workers) or (workers or 1)
            by_plan = ["--plan", str(path)]
            spec = dataclasses.replace(spec, workers=workers or 0)
        with LauncherProcess(["run", *spec.arguments(), *by_plan, str(script)]) as launcher:
            code = launcher.follow()
        if launcher.error:
            raise UsageError(launcher.error)
        results = read_results(directory)
        return values_by_rank(code, read_failure(directory), results, calls=calls, last_lines=launcher.last_lines)


def _calls_of_plan(path: Path, workers: int | None) -> int | None:
    """Returns how many processes of a run by a plan call the function; None if there is no plan for these workers."""
    best = best_plan(PlanFile.read(path), workers=workers)
    if best is None:
        return None
    processes = Processes.of(best)
    return 1 if processes.has_chief or processes.parameter_servers else processes.workers
