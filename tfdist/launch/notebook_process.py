"""What the processes run that `from_notebook` starts: the launcher, and the workers under it."""

import json
import linecache
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tfdist.launch.failure import tells_of_a_lost_peer
from tfdist.launch.linux import die_with_parent
from tfdist.launch.notebook_files import CALL, RankFiles
from tfdist.launch.notebook_pickling import NotSendable, dump


def program(function: str, *arguments: Any) -> str:
    """Returns a program that calls a function of this module, with the search path of this process.

    Args:
        function: Its name.
        arguments: Numbers, strings and lists of them.

    >>> print(program("work", "there"))
    import sys
    sys.path[:] = [...]
    from tfdist.launch.notebook_process import work
    work('there')
    """
    return "\n".join(
        [
            "import sys",
            f"sys.path[:] = {sys.path!r}",
            f"from tfdist.launch.notebook_process import {function}",
            f"{function}({', '.join(map(repr, arguments))})",
        ]
    )


def launch(notebook_pid: int, arguments: list[str]) -> None:
    """Is `tfdist` with these arguments; dies with the notebook's process, and the workers with it."""
    die_with_parent(notebook_pid)
    from tfdist.launch.main import main

    sys.exit(main(arguments))


def work(directory: str) -> None:
    """Calls the function as one of the workers, and leaves its value or its error in files."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    files = RankFiles(Path(directory), int(os.environ["TFDIST_ATTEMPT"]), rank)
    sys.excepthook = _print_error
    try:
        value = _call(Path(directory))
    except Exception as error:
        trace = _of_the_user(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
        files.write_error(type(error).__qualname__, str(error), text)
        raise
    try:
        files.write_value(lambda file: dump(value, file, tensors=True))
    except NotSendable as error:
        # Not a failure: another attempt would return the same.
        files.write_refusal(type(value).__qualname__, str(error))


def _call(directory: Path) -> Any:
    with open(directory / CALL, "rb") as file:
        # The cells' text comes first, so that it is there for whatever the function's own loading needs.
        for name, lines in pickle.load(file).items():
            linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
        function, arguments = pickle.load(file)
    return function(*arguments)


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Leaves out the frames of this file; all of them where nothing else was reached."""
    whole = trace
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, sys.argv[0]):
        trace = trace.tb_next
    return trace or whole


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an error with the lines of cells, which Python's own hook looks for in files.

    One that tells of a lost peer is a line, whose words the launcher knows: the peer has more to say.
    """
    words = f"{kind.__qualname__}: {error}"
    if tells_of_a_lost_peer(words):
        told = next((line for line in words.splitlines()[1:] if tells_of_a_lost_peer(line)), str(error))
        print(f"Traceback (most recent call last):\n{kind.__qualname__}: {told.strip()}", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, _of_the_user(trace))
