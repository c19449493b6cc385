"""from_notebook: calls a function of a notebook or a script in several workers."""

import linecache
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.launch.notebook.child_programs import program
from tfdist.launch.notebook.function_pickling import PicklingError, dump, explain_pickling_error, import_cloudpickle
from tfdist.launch.notebook.launcher_process import NotebookLauncher
from tfdist.launch.notebook.worker_results import (
    CALL,
    FAILURE,
    RankFiles,
    failed_launcher,
    failed_worker,
    last_attempt,
    no_value,
    read_failure,
    unpicklable_value,
)
from tfdist.utils import atomic_files
from tfdist.utils.argument_checks import UsageError, check_seconds, check_whole_number

Value = TypeVar("Value")
_NETWORKS = ("auto", "private", "host")


def from_notebook(
    function: Callable[..., Value],
    *args: Any,
    workers: int = 2,
    max_restarts: int = 0,
    threads_per_worker: int | None = None,
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
        workers: Number of workers, all on this host.
        max_restarts: How often to restart all workers after a failure, and to call the function again. With
            `FailureRecovery` the training resumes from the newest checkpoint.
        threads_per_worker: Threads of each worker. Defaults to the usable cores divided by `workers`.
        network: "private": only the workers can connect to each other; "host": for functions that need the internet;
            "auto": private where permitted.
        log_dir: Directory for the workers' output, in files `rank-<rank>.log`, in addition.
        grace_seconds: Seconds from SIGTERM to SIGKILL when workers are ended.

    Returns:
        The function's return value in each worker, by rank.

    Raises:
        TypeError: If `function` is not callable, or it or an argument cannot be pickled.
        ValueError: If an option is invalid, or this process is already a worker.
        tfdist.launch.WorkerError: If a worker failed, with its rank and its traceback. Also if a value cannot be
            pickled.
        ImportError: If cloudpickle is not installed (the extra `notebook`).
        KeyboardInterrupt: If the call was interrupted, after the workers have ended.
    """
    _check_options(function, workers, max_restarts, threads_per_worker, network, grace_seconds)
    import_cloudpickle()
    with tempfile.TemporaryDirectory(prefix="tfdist-notebook-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        _write_call(directory, function, args)
        script = directory / "worker.py"
        script.write_text(program("run_worker", folder))
        options = ["--workers", str(workers), "--max-restarts", str(max_restarts), "--network", network]
        options += ["--error-file", str(directory / FAILURE), "--grace", f"{grace_seconds:g}"]
        if threads_per_worker is not None:
            options += ["--threads-per-worker", str(threads_per_worker)]
        if log_dir is not None:
            options += ["--log-dir", os.fspath(log_dir)]
        with NotebookLauncher(["run", *options, str(script)]) as launcher:
            code = launcher.follow()
        if launcher.error:
            raise UsageError(launcher.error)
        _raise_failure(code, directory, workers, launcher.last_lines)
        return _values(directory, workers)


def _check_options(
    function: Any, workers: Any, max_restarts: Any, threads_per_worker: Any, network: Any, grace_seconds: Any
) -> None:
    if not callable(function):
        text = repr(function)
        raise TypeError(
            f"`function` is not callable. Received: {text if len(text) <= 80 else f'{text[:77]}...'} of type "
            f"{type(function).__name__}. Expected: a function. Pass its name without parentheses: "
            "from_notebook(train), not from_notebook(train())."
        )
    check_whole_number("workers", workers, at_least=1)
    check_whole_number("max_restarts", max_restarts, at_least=0)
    if threads_per_worker is not None:
        check_whole_number("threads_per_worker", threads_per_worker, at_least=1)
    check_seconds("grace_seconds", grace_seconds)
    if network not in _NETWORKS:
        raise ValueError(f"Invalid `network`. Received: network={network!r}. Expected: one of {_NETWORKS}.")


def _write_call(directory: Path, function: Any, arguments: tuple[Any, ...]) -> None:
    try:
        with atomic_files.replacing(directory / CALL, durable=False) as file:
            pickle.dump(_cells(), file)
            dump((function, arguments), file, tensors=False)
    except PicklingError as error:
        raise TypeError(
            f"The function cannot be sent to the workers. Received: {explain_pickling_error(function, arguments)}. "
            "Expected: a function whose arguments, closure and global variables can be pickled. Create such an object "
            "in the function, which runs in each worker, or pass what it is created from: NumPy arrays, a path, "
            "numbers."
        ) from error


def _cells() -> dict[str, list[str]]:
    """Returns the source lines of notebook cells, which have no file, by their name in tracebacks."""
    return {
        name: entry[2]
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not name.startswith("<frozen ")
    }


def _raise_failure(code: int, directory: Path, workers: int, last_lines: tuple[str, ...]) -> None:
    if code == 0:
        return
    failure = read_failure(directory)
    if failure is None or code == PREEMPTED_EXIT_CODE:
        raise failed_launcher(code, last_lines)
    rank = failure["cause"]["rank"]
    error = None if rank is None else RankFiles(directory, failure["attempt"], rank).error()
    raise failed_worker(failure, error, workers)


def _values(directory: Path, workers: int) -> list[Any]:
    attempt = last_attempt(directory)
    ranks = [RankFiles(directory, attempt, rank) for rank in range(workers)]
    for rank, files in enumerate(ranks):
        if reason := files.pickling_error():
            raise unpicklable_value(rank, reason)
        if not files.value.exists():
            raise no_value(rank)
    values = []
    for files in ranks:
        with open(files.value, "rb") as file:
            values.append(pickle.load(file))
    return values
