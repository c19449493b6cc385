"""Programs of the processes that a call of a function starts: launcher, workers, and the program to plan for."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tfdist.launch.function_call.function_pickling import PicklingError, call_written, dump, write_call
from tfdist.launch.function_call.worker_results import begin_attempt, write_json
from tfdist.launch.restart.worker_exit import reports_lost_peer
from tfdist.utils import atomic_files
from tfdist.utils.linux_syscalls import die_with_parent, fork


def program(function: str, *arguments: Any, **options: Any) -> str:
    """Returns the source of a program that calls a function of this module with this process's search path."""
    return "\n".join(
        [
            "import sys",
            f"sys.path[:] = {sys.path!r}",
            f"from tfdist.launch.function_call.child_programs import {function}",
            f"{function}(*{arguments!r}, **{options!r})",
        ]
    )


@contextlib.contextmanager
def call_directory(
    call: bytes, function: str = "run_worker", *, script: str = "worker.py", prefix: str = "tfdist-notebook-"
) -> Iterator[tuple[Path, Path]]:
    """Yields a new directory with a call of `pickle_call`, and a script there that runs `function` of this module.

    The directory is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        write_call(directory, call)
        (directory / script).write_text(program(function, folder))
        yield directory, directory / script


def run_launcher(caller_pid: int, arguments: list[str], printed: str = "") -> None:
    """Runs `tfdist` with these arguments. The kernel kills it, and its workers, with the caller's process.

    What this process itself prints to its standard output goes to the file `printed`, if that is not empty.
    """
    die_with_parent(caller_pid)
    from tfdist.launch.cli.main import main

    if not printed:
        sys.exit(main(arguments))
    with open(printed, "w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        code = main(arguments)
    sys.exit(code)


def run_orphaned_launcher(caller_pid: int, arguments: list[str], directory: str, *, is_killed: bool = False) -> None:
    """Runs `tfdist` likewise, but ends it with SIGTERM when the caller's process dies: the workers can save.

    With `is_killed` it and its workers are killed then: SIGTERM to one launcher would end those of all hosts.

    `tfdist` is a child of this process, which forwards signals: when Ray ends one of its processes, it kills the
    children, but not their children. The caller removes `directory`; this process does so if the caller has died.
    """
    own_pid = os.getpid()
    launcher = fork()
    if launcher != 0:

        def forward(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and this process is about to
                os.kill(launcher, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        die_with_parent(caller_pid)
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        sys.exit(code if code >= 0 else 128 - code)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until the launcher handles it

    def end_at_once(*_: object) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)  # the kernel then kills the workers

    signal.signal(signal.SIGUSR2, end_at_once)
    try:
        die_with_parent(own_pid, signal.SIGUSR2 if is_killed else signal.SIGTERM)
        from tfdist.launch.cli.main import main

        code = main(arguments)
    finally:
        if os.getppid() != own_pid:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(code)


def run_probed(directory: str) -> None:
    """Calls the function as the program that `tfdist plan` measures."""
    call_written(Path(directory))


def run_worker(directory: str) -> None:
    """Calls the function in a worker, and writes its value or its error to files."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    result = begin_attempt(Path(directory), int(os.environ["TFDIST_ATTEMPT"]), rank)
    sys.excepthook = _print_error
    try:
        value = call_written(Path(directory))
    except Exception as error:
        trace = _user_frames(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
        content = {"type": type(error).__qualname__, "message": str(error), "traceback": text}
        write_json(result.with_suffix(".error"), content)
        raise
    try:
        with atomic_files.replacing(result.with_suffix(".value"), durable=False) as file:
            dump(value, file, tensors=True)
    except PicklingError as error:
        # Not a failure of the attempt: another one would return the same value.
        content = {"type": type(value).__qualname__, "reason": str(error)}
        write_json(result.with_suffix(".pickling-error"), content)


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of these modules, unless it has no others."""
    full_trace = trace
    internal_files = (__file__, call_written.__code__.co_filename, sys.argv[0])
    while trace is not None and trace.tb_frame.f_code.co_filename in internal_files:
        trace = trace.tb_next
    return trace or full_trace


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an error with source lines of cells, which Python's hook looks for in files.

    An error that reports a lost peer is shortened to the line that the launcher recognises: the peer's error is the
    cause.
    """
    words = f"{kind.__qualname__}: {error}"
    if reports_lost_peer(words):
        line = next((text for text in words.splitlines()[1:] if reports_lost_peer(text)), str(error))
        print(f"Traceback (most recent call last):\n{kind.__qualname__}: {line.strip()}", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, _user_frames(trace))
