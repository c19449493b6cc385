"""Workers for a function of a notebook or of a script."""

import linecache
import math
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tfdist.launch.errors import UsageError
from tfdist.launch.notebook_errors import failed_launcher, failed_worker, no_value, unsent_value
from tfdist.launch.notebook_files import CALL, FAILURE, RankFiles, failure, last_attempt, whole_file
from tfdist.launch.notebook_launcher import NotebookLauncher
from tfdist.launch.notebook_pickling import NotSendable, dump, import_cloudpickle, why_not
from tfdist.launch.notebook_process import program

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
    grace: float = 5.0,
) -> list[Value]:
    """Calls a function in several new processes, the workers of one cluster, and returns its values by rank.

    It is `tfdist run` for a function, which may stand in a cell: `TF_CONFIG` is set, the cores are shared out, lines
    of output are shown behind their rank, the first failure ends all, and nothing outlives this process. The function
    makes its strategy itself, `tfdist.strategies.MultiWorkerMirroredStrategy()`, and should do so first of all. This
    process may have used TensorFlow already.

    The function is sent by cloudpickle with its closure and the globals that it names; changes that a worker makes to
    them stay in the worker. Modules are imported anew there. The arguments are the same for all workers; keyword
    arguments go through `functools.partial`.

    An interrupt (the kernel's, or Ctrl-C) tells all workers to end (SIGTERM), which `FailureRecovery` takes as time to
    save, and kills them after `grace`; a second one kills them at once.

    >>> from tfdist.launch import from_notebook
    >>> base = 40
    >>> def add(number):
    ...     from tfdist import cluster
    ...     return base + number + cluster.detect().task.index
    >>> from_notebook(add, 1, workers=2)
    [41, 42]

    Args:
        function: Any callable that can be pickled with what it uses. Variables, models, data sets and strategies
            cannot be sent: make them in the function.
        *args: Its positional arguments.
        workers: Number of workers, all on this host.
        max_restarts: After a failure all workers are started again, and the function is called anew, at most so often.
            With `FailureRecovery` it goes on from the newest checkpoint.
        threads_per_worker: Threads of each worker. By default the usable cores divided by `workers`.
        network: "private": only the workers reach each other; "host": for functions that need the internet; "auto":
            private where permitted.
        log_dir: Also write `rank-<rank>.log` there.
        grace: Seconds from SIGTERM to SIGKILL when workers are ended.

    Returns:
        What the function has returned in each worker, by rank.

    Raises:
        TypeError: `function` is not callable, or it or an argument cannot be sent.
        ValueError: An option is not what is expected, or this process is a worker already.
        tfdist.launch.WorkerError: A worker failed; the error names its rank and shows its traceback. Or a value cannot
            be sent back.
        ImportError: cloudpickle is not installed (the extra `notebook`).
        KeyboardInterrupt: The call was interrupted; the workers have ended.
    """
    if not callable(function):
        raise TypeError(
            f"There is no function to call. Received: {_shown(function)} of type {type(function).__name__}. Expected: "
            "a function. Give its name without parentheses: from_notebook(train), not from_notebook(train())."
        )
    _check_number("workers", workers, at_least=1)
    _check_number("max_restarts", max_restarts, at_least=0)
    if threads_per_worker is not None:
        _check_number("threads_per_worker", threads_per_worker, at_least=1)
    if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < math.inf:
        raise ValueError(
            f"`grace` is not a time. Received: grace={_shown(grace)}. Expected: seconds, a number of at least 0."
        )
    if network not in _NETWORKS:
        raise ValueError(f"There is no such network. Received: network={network!r}. Expected: one of {_NETWORKS}.")
    import_cloudpickle()
    with tempfile.TemporaryDirectory(prefix="tfdist-notebook-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        _write_call(directory, function, args)
        script = directory / "worker.py"
        script.write_text(program("work", folder))
        options = ["--workers", str(workers), "--max-restarts", str(max_restarts), "--network", network]
        options += ["--error-file", str(directory / FAILURE), "--grace", f"{grace:g}"]
        if threads_per_worker is not None:
            options += ["--threads-per-worker", str(threads_per_worker)]
        if log_dir is not None:
            options += ["--log-dir", os.fspath(log_dir)]
        with NotebookLauncher(["run", *options, str(script)]) as launcher:
            code = launcher.follow()
        if launcher.error:
            raise UsageError(launcher.error)
        _raise_failure(code, directory, workers, launcher.last_words)
        return _values(directory, workers)


def _write_call(directory: Path, function: Any, arguments: tuple[Any, ...]) -> None:
    try:
        with whole_file(directory / CALL) as file:
            pickle.dump(_cells(), file)
            dump((function, arguments), file, tensors=False)
    except NotSendable as error:
        raise TypeError(
            f"The function cannot be sent to the workers. Received: {why_not(function, arguments)}. Expected: a "
            "function whose arguments, closure and global variables can be pickled. Make such an object in the "
            "function, which runs in each worker, or pass what it is made from: NumPy arrays, a path, numbers."
        ) from error


def _cells() -> dict[str, list[str]]:
    """The text of what has no file, by the name that tracebacks give it: the cells of a notebook."""
    return {
        name: entry[2]
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not name.startswith("<frozen ")
    }


def _raise_failure(code: int, directory: Path, workers: int, last_words: tuple[str, ...]) -> None:
    if code == 0:
        return
    said = failure(directory)
    if said is None or code == 75:
        raise failed_launcher(code, last_words)
    rank = said["cause"]["rank"]
    error = None if rank is None else RankFiles(directory, said["attempt"], rank).error()
    raise failed_worker(said, error, workers)


def _values(directory: Path, workers: int) -> list[Any]:
    attempt = last_attempt(directory)
    ranks = [RankFiles(directory, attempt, rank) for rank in range(workers)]
    for rank, files in enumerate(ranks):
        if refusal := files.refusal():
            raise unsent_value(rank, refusal)
        if not files.value.exists():
            raise no_value(rank)
    values = []
    for files in ranks:
        with open(files.value, "rb") as file:
            values.append(pickle.load(file))
    return values


def _check_number(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(
            f"`{name}` is not a number of that kind. Received: {name}={_shown(value)}. Expected: a whole number of at "
            f"least {at_least}."
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
