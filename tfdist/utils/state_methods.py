"""Objects that save and restore their own state by two methods."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

_NAMES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class StateMethods(NamedTuple):
    """The methods by which an object saves and restores its own state."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def state_methods(one: Any) -> StateMethods | None:
    """Returns the methods of an object with `state_dict` and `load_state_dict`, or `get_state` and `set_state`.

    >>> import types
    >>> one = types.SimpleNamespace(get_state=lambda: 3, set_state=print)
    >>> state_methods(one).get(), state_methods([])
    (3, None)
    """
    for names in _NAMES:
        if all(callable(getattr(one, name, None)) for name in names):
            return StateMethods(*(functools.partial(_call, one, name) for name in names))
    return None


def _call(one: Any, name: str, *arguments: Any) -> Any:
    return getattr(one, name)(*arguments)  # a program may have replaced the method
