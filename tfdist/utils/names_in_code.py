"""The names that Python code looks up."""

import types
from collections.abc import Iterator


def names_in_code(code: types.CodeType) -> Iterator[str]:
    """Yields the names that a function and the functions within it look up: globals and attributes.

    >>> list(names_in_code((lambda: lambda: len(x.y)).__code__))
    ['len', 'x', 'y']
    """
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in_code(constant)
