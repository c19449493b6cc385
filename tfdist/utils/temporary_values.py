"""Values that a context variable, or attributes of an object, have within a block only."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Value = TypeVar("_Value")


@contextmanager
def setting(variable: contextvars.ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Sets a context variable within the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def setting_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes, which `owner` has, within the block.

    >>> import types
    >>> owner = types.SimpleNamespace(number=1)
    >>> with setting_attributes(owner, number=2):
    ...     print(owner.number)
    2
    >>> owner.number
    1
    """
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
