"""Values by the identity of objects: optimizers and models of users may be equal to others, or not hashable."""

import weakref
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")


class WeakIdentityMap(Generic[_Value]):
    """Values by object. Objects are compared by identity, and forgotten with their value when they end.

    >>> class Equal:
    ...     def __eq__(self, other):
    ...         return True
    >>> one, other = Equal(), Equal()
    >>> known = WeakIdentityMap()
    >>> known[one] = "one"
    >>> known.get(one), known.get(other)
    ('one', None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], _Value]] = {}

    def __setitem__(self, key: Any, value: _Value) -> None:
        """Notes the value of an object, which must permit weak references."""
        number, entries = id(key), self._entries
        entries[number] = (weakref.ref(key, lambda _: entries.pop(number, None)), value)

    def get(self, key: Any) -> _Value | None:
        """Returns the value of an object; `None` if there is none."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def __contains__(self, key: Any) -> bool:
        return id(key) in self._entries
