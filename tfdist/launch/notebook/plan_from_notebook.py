"""plan_from_notebook: finds the fastest strategy for a function of a notebook."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist.launch.cli.plan_command import memory_bytes as checked_memory
from tfdist.launch.function_call.child_programs import call_directory
from tfdist.launch.function_call.function_pickling import check_function, pickle_call
from tfdist.launch.function_call.launcher_process import LauncherProcess
from tfdist.launch.function_call.worker_results import WorkerError
from tfdist.planning.plans import Plan, PlanFile
from tfdist.planning.topology import parse_link
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import UsageError, check_seconds, check_whole_number

_COMMAND = "$ tfdist run "  # a line of the table, which needs a script


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
