"""Pickles functions, their calls and values with cloudpickle; rejects objects of one process, such as models.

A call is a file, which a process of workers, or of a probe, reads.
"""

import functools
import io
import linecache
import marshal
import os
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tfdist.utils.names_in_code import names_in_code
from tfdist.utils.optional_modules import import_optional

# Types are looked up only in libraries that are loaded: otherwise there are no such objects.
_PROCESS_BOUND = (
    ("tensorflow", "Variable"),
    ("tensorflow", "data.Dataset"),
    ("tensorflow", "distribute.Strategy"),
    ("keras", "Model"),
    ("keras", "layers.Layer"),
    ("keras", "optimizers.Optimizer"),
    ("keras", "Variable"),
)
_TENSOR = ("tensorflow", "Tensor")
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_CALL_FILE = "call.pickle"


class PicklingError(Exception):
    """An object is rejected or cannot be pickled; the message is the reason."""


def dump(value: Any, file: IO[bytes], *, tensors: bool) -> None:
    """Pickles a value. Functions and classes that are not in a module are pickled with everything they use.

    Tensors are accepted if `tensors` is true: unpickling one in a worker initializes TensorFlow before its strategy.
    A value that holds an object of its process (a variable, model, dataset or open file) is a PicklingError.
    """
    cloudpickle = import_cloudpickle()
    rejected = _loaded(_PROCESS_BOUND if tensors else (_TENSOR, *_PROCESS_BOUND))

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        # cloudpickle 3.1.3 drops the names of files, by which a worker's traceback shows the lines of a notebook.
        dispatch_table = {**cloudpickle.Pickler.dispatch_table, types.CodeType: _reduced_code}

        def persistent_id(self, obj: Any) -> None:
            for kind, name in rejected:
                if isinstance(obj, kind):
                    raise PicklingError(f"it is a {name}" if obj is value else f"it holds a {name}")
            # cloudpickle would send a copy of its content.
            if isinstance(obj, _FILES) and obj not in (sys.stdin, sys.stdout, sys.stderr):
                raise PicklingError("it is an open file" if obj is value else "it holds an open file")

    try:
        Pickler(file, protocol=5).dump(value)
    except PicklingError:
        raise
    except Exception as error:  # __reduce__ may raise anything
        raise PicklingError(" ".join(str(error).split()) or type(error).__name__) from error


def _reduced_code(code: types.CodeType) -> tuple[Any, ...]:
    return marshal.loads, (marshal.dumps(code),)  # both processes run the same version of Python


def import_cloudpickle() -> Any:
    """Returns the module `cloudpickle`, or raises an ImportError that says how to install it."""
    return import_optional(
        "cloudpickle",
        "cloudpickle, which sends functions to workers, is not installed. Received: no module of that name. "
        "Expected: the extra `notebook`. Run: pip install 'tfdist[notebook]'",
    )


def explain_pickling_error(function: Any, arguments: Sequence[Any]) -> str:
    """Returns the part of a function and its arguments that cannot be pickled, and the reason."""
    for number, argument in enumerate(arguments, 1):
        if reason := _reason(argument):
            return f"argument {number} of type {type(argument).__name__} ({reason})"
    return _culprit(function, set()) or f"{name_of(function)} ({_reason(function)})"


def name_of(function: Any) -> str:
    """Returns the name of a function, for messages.

    >>> name_of(name_of), name_of(functools.partial(name_of, 1))
    ('name_of', 'name_of')
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__).removeprefix("<locals>.")


def _culprit(function: Any, seen: set[int]) -> str:
    """Finds the object that cannot be pickled among those that a function uses, directly or through others."""
    seen.add(id(function))
    for name, value in _used(function):
        if id(value) in seen or not (reason := _reason(value)):
            continue
        if deeper := _culprit(value, seen):
            return deeper
        return f"{name_of(function)}, which uses `{name}` of type {type(value).__name__} ({reason})"
    return ""


def _used(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and values of the closure, of the globals in the code, and of the defaults of a function."""
    if isinstance(function, functools.partial):
        yield name_of(function), function.func
        yield from ((f"argument {number}", value) for number, value in enumerate(function.args, 1))
        yield from function.keywords.items()
    elif isinstance(function, types.MethodType):
        yield "self", function.__self__
        yield from _used(function.__func__)
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # an empty cell: not assigned yet
                pass
        for name in names_in_code(function.__code__):
            if name in function.__globals__:
                yield name, function.__globals__[name]
        yield from (("a default", value) for value in function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).items()
    elif wrapped := getattr(function, "__wrapped__", None):
        yield name_of(wrapped), wrapped


def _reason(value: Any) -> str:
    try:
        with open(os.devnull, "wb") as file:
            dump(value, file, tensors=False)
    except PicklingError as error:
        return str(error)
    return ""


def _loaded(names: Sequence[tuple[str, str]]) -> list[tuple[type, str]]:
    """Returns the types whose library is loaded, with their public names."""
    loaded_types = []
    for library, path in names:
        kind: Any = sys.modules.get(library)
        for part in path.split("."):
            kind = getattr(kind, part, None)
        if isinstance(kind, type):
            loaded_types.append((kind, f"{'tf' if library == 'tensorflow' else library}.{path}"))
    return loaded_types


def check_function(function: Any, *, caller: str) -> None:
    """Checks the first argument of `caller`."""
    if not callable(function):
        text = repr(function)
        raise TypeError(
            f"`function` is not callable. Received: {text if len(text) <= 80 else f'{text[:77]}...'} of type "
            f"{type(function).__name__}. Expected: a function. Pass its name without parentheses: "
            f"{caller}(train), not {caller}(train())."
        )


def pickle_call(function: Any, arguments: tuple[Any, ...]) -> bytes:
    """Returns a call for `write_call`. A TypeError names what cannot be pickled."""
    file = io.BytesIO()
    # Cells of notebooks have no file: their source lines, by their name in tracebacks.
    cells = {
        name: entry[2]
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not name.startswith("<frozen ")
    }
    pickle.dump(cells, file)
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
    (directory / _CALL_FILE).write_bytes(call)


def call_written(directory: Path) -> Any:
    """Calls the function that `write_call` has written, and returns its value."""
    with open(directory / _CALL_FILE, "rb") as file:
        # Cell sources come first: loading the function may need them.
        for name, lines in pickle.load(file).items():
            linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
        function, arguments = pickle.load(file)
    return function(*arguments)
