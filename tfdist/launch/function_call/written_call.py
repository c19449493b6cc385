"""The call of a function as a file, which a process of workers, or of a probe, reads."""

import io
import linecache
import pickle
from pathlib import Path
from typing import Any

from tfdist.launch.function_call.function_pickling import PicklingError, dump, explain_pickling_error
from tfdist.utils import atomic_files

_NAME = "call.pickle"


def check_function(function: Any, *, caller: str) -> None:
    """Checks the first argument of `caller`.

    Raises:
        TypeError: It is not callable.
    """
    if not callable(function):
        text = repr(function)
        raise TypeError(
            f"`function` is not callable. Received: {text if len(text) <= 80 else f'{text[:77]}...'} of type "
            f"{type(function).__name__}. Expected: a function. Pass its name without parentheses: "
            f"{caller}(train), not {caller}(train())."
        )


def pickle_call(function: Any, arguments: tuple[Any, ...]) -> bytes:
    """Returns a call for `write_call`.

    Raises:
        TypeError: The function or an argument cannot be pickled; the message names it.
    """
    file = io.BytesIO()
    pickle.dump(_cells(), file)
    try:
        dump((function, arguments), file, tensors=False)
    except PicklingError as error:
        raise TypeError(
            f"The function cannot be sent to the workers. Received: {explain_pickling_error(function, arguments)}. "
            "Expected: a function whose arguments, closure and global variables can be pickled. Create such an object "
            "in the function, which runs in each worker, or pass what it is created from: NumPy arrays, a path, "
            "numbers."
        ) from error
    return file.getvalue()


def write_call(directory: Path, call: bytes) -> None:
    """Writes a call of `pickle_call` into a directory, for `call_written`."""
    with atomic_files.replacing(directory / _NAME, durable=False) as file:
        file.write(call)


def _cells() -> dict[str, list[str]]:
    """Returns the source lines of notebook cells, which have no file, by their name in tracebacks."""
    return {
        name: entry[2]
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not name.startswith("<frozen ")
    }


def call_written(directory: Path) -> Any:
    """Calls the function that `write_call` has written, and returns its value."""
    with open(directory / _NAME, "rb") as file:
        # Cell sources come first: loading the function may need them.
        for name, lines in pickle.load(file).items():
            linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
        function, arguments = pickle.load(file)
    return function(*arguments)
