"""Pickles functions of a notebook and what they return; refuses, by name, what belongs to one process."""

import functools
import io
import sys
import types
from collections.abc import Iterator, Sequence
from typing import IO, Any

# Looked up where they are loaded already: who has none of these objects need not import the libraries.
_OF_A_PROCESS = (
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


class NotSendable(Exception):
    """An object that is refused, or that cannot be pickled.

    Args:
        reason: Why, to stand behind its type.
    """


def dump(value: Any, file: IO[bytes] | io.RawIOBase, *, tensors: bool) -> None:
    """Writes a value; functions and classes that no module holds are written with what they use.

    Args:
        value: Anything.
        file: A binary file.
        tensors: Whether tensors may be in it. Read in a worker they would start TensorFlow before its strategy.

    Raises:
        NotSendable: If it cannot be pickled, or holds what belongs to its process: variables, models, data sets.
    """
    cloudpickle = import_cloudpickle()
    refused = _loaded(_OF_A_PROCESS if tensors else (_TENSOR, *_OF_A_PROCESS))

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        def persistent_id(self, obj: Any) -> None:
            for kind, name in refused:
                if isinstance(obj, kind):
                    raise NotSendable(f"it is a {name}" if obj is value else f"it holds a {name}")
            # cloudpickle would send a copy of what can be read of it.
            if isinstance(obj, _FILES) and obj not in (sys.stdin, sys.stdout, sys.stderr):
                raise NotSendable("it is an open file" if obj is value else "it holds an open file")

    try:
        Pickler(file, protocol=5).dump(value)
    except NotSendable:
        raise
    except Exception as error:  # whatever the object's own reduction raises
        raise NotSendable(" ".join(str(error).split()) or type(error).__name__) from error


def import_cloudpickle() -> Any:
    """Returns the library.

    Raises:
        ImportError: If it is not installed; the message says how to.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "Functions are sent to workers by cloudpickle. Received: no module of that name. Expected: the extra "
            "`notebook`. Run: pip install 'tfdist[notebook]'"
        ) from error
    return cloudpickle


def why_not(function: Any, arguments: Sequence[Any]) -> str:
    """Returns what cannot be sent of a function and its arguments, and why.

    >>> import threading
    >>> why_not(len, [1, threading.Lock()])
    "argument 2 of type lock (cannot pickle '_thread.lock' object)"
    """
    for number, argument in enumerate(arguments, 1):
        if reason := _reason(argument):
            return f"argument {number} of type {type(argument).__name__} ({reason})"
    return _culprit(function, set()) or f"{name_of(function)} ({_reason(function)})"


def name_of(function: Any) -> str:
    """Returns what a user calls a function.

    >>> name_of(name_of), name_of(functools.partial(name_of, 1))
    ('name_of', 'name_of')
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__).removeprefix("<locals>.")


def _culprit(function: Any, seen: set[int]) -> str:
    """Finds the object that cannot be sent among those that a function uses, or that its functions use."""
    seen.add(id(function))
    for name, value in _used(function):
        if id(value) in seen or not (reason := _reason(value)):
            continue
        if deeper := _culprit(value, seen):
            return deeper
        return f"{name_of(function)}, which uses `{name}` of type {type(value).__name__} ({reason})"
    return ""


def _used(function: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of a function's closure, of the globals that its code names, and of its defaults."""
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
            except ValueError:  # not assigned yet
                pass
        for name in _names(function.__code__):
            if name in function.__globals__:
                yield name, function.__globals__[name]
        yield from (("a default", value) for value in function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).items()
    elif wrapped := getattr(function, "__wrapped__", None):
        yield name_of(wrapped), wrapped


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _reason(value: Any) -> str:
    try:
        dump(value, _Nowhere(), tensors=False)
    except NotSendable as error:
        return str(error)
    return ""


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def _loaded(names: Sequence[tuple[str, str]]) -> list[tuple[type, str]]:
    """Those of the types whose library is loaded, with the names that users know."""
    found = []
    for library, path in names:
        kind: Any = sys.modules.get(library)
        for part in path.split("."):
            kind = getattr(kind, part, None)
        if isinstance(kind, type):
            found.append((kind, f"{'tf' if library == 'tensorflow' else library}.{path}"))
    return found
