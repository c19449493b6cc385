"""Checks numeric arguments of public functions; all of them raise the same form of error."""

import math
from numbers import Integral, Real
from typing import Any


def is_whole_number(value: Any, *, at_least: int) -> bool:
    """Whether a value is an integer of at least `at_least`, also one of NumPy's types; a bool is not.

    >>> [is_whole_number(value, at_least=1) for value in (1, 0, 2.0, True, float("nan"))]
    [True, False, False, False, False]
    """
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= at_least


def is_number(value: Any, *, at_least: float) -> bool:
    """Whether a value is a finite number of at least `at_least`, also one of NumPy's types; a bool is not.

    >>> [is_number(value, at_least=0) for value in (0, 2.5, -1, True, float("inf"), "1")]
    [True, True, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return at_least <= float(value) < math.inf
    except OverflowError:  # an int too large for a float
        return False


def check_whole_number(name: str, value: Any, *, at_least: int, example: int | None = None) -> None:
    """Checks an argument that is a whole number.

    Args:
        name: Name of the argument.
        value: Its value.
        at_least: The smallest value that is accepted.
        example: A typical value, for the message.

    Raises:
        ValueError: If `value` is not an integer, is a bool, or is too small.

    >>> check_whole_number("workers", 2.5, at_least=1)
    Traceback (most recent call last):
        ...
    ValueError: Invalid `workers`. Received: workers=2.5. Expected: a whole number of at least 1.
    """
    if not is_whole_number(value, at_least=at_least):
        such_as = "" if example is None else f", such as {example}"
        raise ValueError(
            f"Invalid `{name}`. Received: {name}={_shortened(value)}. Expected: a whole number of at least "
            f"{at_least}{such_as}."
        )


def check_seconds(name: str, value: Any) -> None:
    """Checks an argument that is a duration.

    Args:
        name: Name of the argument.
        value: Its value.

    Raises:
        ValueError: If `value` is not a finite number of at least 0.
    """
    if not is_number(value, at_least=0):
        raise ValueError(
            f"Invalid `{name}`. Received: {name}={_shortened(value)}. Expected: a finite number of seconds of at "
            "least 0."
        )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
