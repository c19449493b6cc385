"""Functions of a notebook or a script: called in several workers, or planned for, in new processes."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tfdist.launch.cli.plan_command import memory_bytes as checked_memory
from tfdist.launch.function_call.child_programs import call_directory
from tfdist.launch.function_call.function_pickling import check_function, pickle_call
from tfdist.launch.function_call.launcher_process import LauncherProcess
from tfdist.launch.function_call.worker_results import (
    FAILURE,
    WorkerError,
    read_failure,
    read_results,
    values_by_rank,
)
from tfdist.launch.run_spec import RunSpec
from tfdist.planning.plans import Plan, PlanFile, Processes, best_plan
from tfdist.planning.topology import parse_link
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import UsageError, check_seconds, check_whole_number

_COMMAND = "$ tfdist run "  # a line of the table, which needs a script
Value = TypeVar("Value")
_NETWORKS = ("auto", "private", "host")


class NotebookPlans:
    """The plans for a function. Its representation is the table of `tfdist plan`.

    Attributes:
        plans: All plans that fit into memory, best first for each number of workers.
        too_large: Those that do not, each with the missing bytes.
    """

    def __init__(self, document: bytes, table: str, file: PlanFile) -> None:
        self._document, self._table = document, table
        self.plans: tuple[Plan, ...] = tuple(file.plans)
        self.too_large: tuple[tuple[Plan, int], ...] = tuple(file.too_large)

    def __repr__(self) -> str:
        return self._table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file of `tfdist plan --json`, for `tfdist run --plan` and `planned(path)`."""
        atomic_files.write(Path(path), self._document)


def plan_from_notebook(
    function: Callable[..., Any],
    *args: Any,
    workers: int | Sequence[int] = (2,),
    link: str | None = None,
    devices: int = 1,
    memory: str | None = None,
    cores_per_worker: int | None = None,
    allow_compression: bool = False,
    allow_local_updates: bool = False,
    with_xla: bool = True,
    timeout_seconds: float = 60.0,
) -> NotebookPlans:
    """Measures a function that trains a model, and predicts how fast each strategy trains it: `tfdist plan` for a cell.

    The function runs in new processes up to its first `fit`, which is measured for a few steps; nothing after it runs,
    callbacks do not, and nothing is written. It creates its strategy by `tfdist.strategies.planned()`. As for
    `from_notebook`, cloudpickle sends it with what it uses.

    ```python
    plans = plan_from_notebook(train, 10, workers=(2, 4), link="1gbit,0.1ms", allow_compression=True)
    plans  # shows the table
    plans.save("plan.json")
    from_notebook(train, 10, plan=plans, workers=2)
    ```

    Args:
        function: Any callable that can be pickled with the objects it uses.
        *args: Positional arguments of the function.
        workers: Numbers of workers to plan for.
        link: The Ethernet link of each worker, "1gbit" or "1gbit,0.1ms". None: all workers are on this machine.
        devices: Devices of each worker, each as fast as the measured one.
        memory: Memory of each worker, as "16GiB". None: what is free here.
        cores_per_worker: Cores of each worker. None: as `tfdist plan` chooses.
        allow_compression: Whether plans may round gradients or leave parts of them out.
        allow_local_updates: Whether the updates of a plan may differ from the program's.
        with_xla: Whether steps that XLA compiles are measured, which takes time.
        timeout_seconds: The limit of the measurements.

    Returns:
        The plans: `plans` as `tfdist.planning.plans.Plan`, best first for each number of workers, and `too_large` with
        the missing bytes, those that do not fit into memory. `save(path)` writes the file for `tfdist run --plan`. The
        representation is the table.

    Raises:
        TypeError: If `function` is not callable, or it or an argument cannot be pickled.
        ValueError: If an option is invalid.
        tfdist.launch.WorkerError: If the function failed, never called `fit`, or no plan fits into memory.
        ImportError: If cloudpickle is not installed (the extra `notebook`).
        KeyboardInterrupt: If the call was interrupted, after its processes have ended.
    """
    numbers = [workers] if isinstance(workers, int) else list(workers)
    _check_options(function, numbers, link, devices, memory, cores_per_worker, timeout_seconds)
    with call_directory(pickle_call(function, args), "run_probed", script="function.py") as (directory, script):
        document, table = directory / "plan.json", directory / "table.txt"
        options = ["--workers", ",".join(map(str, numbers)), "--devices", str(devices), "--json", str(document)]
        options += ["--timeout", f"{timeout_seconds:g}"]
        values_by_option = {"--link": link, "--memory": memory, "--cores-per-worker": cores_per_worker}
        for name, value in values_by_option.items():
            options += [] if value is None else [name, str(value)]
        flags = {"--allow-compression": allow_compression, "--allow-local-updates": allow_local_updates}
        options += [name for name, value in {**flags, "--no-xla": not with_xla}.items() if value]
        with LauncherProcess(["plan", *options, str(script)], printed=str(table)) as launcher:
            code = launcher.follow()
        if launcher.error:
            raise UsageError(launcher.error)
        if code != 0:
            last_lines = "\n".join(launcher.last_lines)
            raise WorkerError(
                f"The function could not be planned. Received: exit code {code}. Expected: 0.\n{last_lines}"
            )
        lines = table.read_text(encoding="utf-8").splitlines()
        shown = "\n".join(line for line in lines if not line.lstrip().startswith(_COMMAND)).strip("\n")
        return NotebookPlans(document.read_bytes(), shown, PlanFile.read(document))


def _check_options(
    function: Any, workers: list[Any], link: Any, devices: Any, memory: Any, cores: Any, timeout_seconds: Any
) -> None:
    check_function(function, caller="plan_from_notebook")
    if not workers:
        raise ValueError(
            "There is no number of workers. Received: workers=(). Expected: one or more numbers, as workers=(2, 4)."
        )
    for number in workers:
        check_whole_number("workers", number, at_least=1)
    check_whole_number("devices", devices, at_least=1)
    if cores is not None:
        check_whole_number("cores_per_worker", cores, at_least=1)
    check_seconds("timeout_seconds", timeout_seconds)
    for parse, value in ((parse_link, link), (checked_memory, memory)):
        if value is not None:
            try:
                parse(str(value))
            except argparse.ArgumentTypeError as error:
                raise ValueError(str(error)) from error


def from_notebook(
    function: Callable[..., Value],
    *args: Any,
    workers: int | None = None,
    plan: NotebookPlans | str | os.PathLike[str] | None = None,
    elastic: int | None = None,
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
        elastic: The least number of workers that train: a worker that is lost is started again alone, while the others
            train on, as by `tfdist run --elastic`. None: the loss of one is a failure of all.
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
        The function's return value in each worker, by rank. With `elastic` that of the last process of a rank that has
        returned; None if it was lost, and none has joined the others before the end.

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
        elastic=elastic,
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
            best = best_plan(PlanFile.read(path), workers=workers)
            processes = None if best is None else Processes.of(best)
            if processes is None:  # the command says that there is no plan for these workers
                calls = workers or 1
            else:
                calls = 1 if processes.has_chief or processes.parameter_servers else processes.workers
            by_plan = ["--plan", str(path)]
            spec = dataclasses.replace(spec, workers=workers or 0)
        with LauncherProcess(["run", *spec.arguments(), *by_plan, str(script)]) as launcher:
            code = launcher.follow()
        if launcher.error:
            raise UsageError(launcher.error)
        results = read_results(directory)
        return values_by_rank(
            code,
            read_failure(directory),
            results,
            calls=calls,
            may_lack_values=elastic is not None,
            last_lines=launcher.last_lines,
        )
