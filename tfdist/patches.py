"""Replaces attributes of TensorFlow and Keras: each patch does so once, and is listed. Tests undo them.

`python -m tfdist.strategies` lists all that strategies replace.
"""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_New = TypeVar("_New")
_ABSENT = object()


class Replacement(NamedTuple):
    """One attribute of TensorFlow or Keras that was replaced, and the function that did it."""

    owner: Any  # a class or module
    name: str
    stock: Any  # what was there; `_ABSENT` if a class inherited it, or had none
    new: Any
    patch: Callable[..., None]


_lock = threading.RLock()
_replacements: list[Replacement] = []
_installed: set[Any] = set()  # the patches, with their arguments
_running: list[Callable[..., None]] = []


def patch(install: Callable[..., None]) -> Callable[..., None]:
    """Decorates a function that replaces attributes by `replace`. More calls with equal arguments have no effect.

    The first line of its docstring is the reason in the table.
    """

    @functools.wraps(install)
    def install_once(*args: Any) -> None:
        with _lock:
            if (install, args) in _installed:
                return
            _running.append(install)
            try:
                install(*args)
            finally:
                _running.pop()
            _installed.add((install, args))

    return install_once


def replace(owner: Any, name: str) -> Callable[[_New], _New]:
    """Decorates what replaces `owner.name`; a function gets the name and the docstring of the stock one."""

    def put(new: _New) -> _New:
        if isinstance(new, types.FunctionType) and hasattr(owner, name):
            functools.update_wrapper(new, getattr(owner, name))
        is_module = isinstance(owner, types.ModuleType)  # may load the attribute when it is read
        stock = getattr(owner, name) if is_module else vars(owner).get(name, _ABSENT)
        setattr(owner, name, new)
        _replacements.append(Replacement(owner, name, stock, new, _running[-1]))
        return new

    return put


def replacements() -> tuple[Replacement, ...]:
    """Returns what is replaced in this process, in the order of installation."""
    return tuple(_replacements)


def table() -> str:
    """Lists what is replaced in this process: each patch with its reason, and below it the attributes it replaces."""
    paths: dict[str, list[str]] = {}
    for owner, name, *_, patch in _replacements:
        why = (patch.__doc__ or "").partition("\n")[0]
        path = owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}:{owner.__qualname__}"
        paths.setdefault(f"{patch.__module__}:{patch.__name__}: {why}", []).append(f"    {path}.{name}")
    return "\n".join("\n".join([title, *replaced]) for title, replaced in sorted(paths.items()))
