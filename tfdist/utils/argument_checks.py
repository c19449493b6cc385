"""Checks what users pass: arguments of functions, options of commands and environment variables."""

import argparse
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

MAX_SEED = 2**32 - 1  # of NumPy's generator, and of PYTHONHASHSEED
_MAX_SECONDS = 1e9  # the system calls that wait accept no more


class UsageError(ValueError):
    """The command, or the environment it runs in, is invalid: nothing was started; exit code 2."""


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
    """Checks an argument that is a duration."""
    if not is_number(value, at_least=0):
        raise ValueError(
            f"Invalid `{name}`. Received: {name}={_shortened(value)}. Expected: a finite number of seconds of at "
            "least 0."
        )


def check_seed(seed: Any) -> None:
    """Checks an argument `seed`."""
    if not is_whole_number(seed, at_least=0) or seed > MAX_SEED:
        raise ValueError(
            f"Invalid `seed`. Received: seed={_shortened(seed)}. Expected: a whole number from 0 to {MAX_SEED}, or "
            "None for a new one."
        )


def whole_number(*, at_least: int, at_most: int | None = None, example: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers, for the `type` of an argument.

    >>> whole_number(at_least=1, example=2)("0")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: Invalid number. Received: '0'. Expected: a whole number of at least 1, for example 2.
    """

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = at_least - 1
        if number < at_least or (at_most is not None and number > at_most):
            limit = "" if at_most is None else f" and at most {at_most}"
            raise argparse.ArgumentTypeError(
                f"Invalid number. Received: {text!r}. Expected: a whole number of at least {at_least}{limit}, for "
                f"example {example}."
            )
        return number

    return parse


def seconds(*, may_be_zero: bool = True, example: float) -> Callable[[str], float]:
    """Returns a parser of durations in seconds, for the `type` of an argument.

    >>> seconds(may_be_zero=False, example=300)("0")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: Invalid number. Received: '0'. Expected: a number of seconds above 0, for example 300.
    """
    smallest = "of at least 0" if may_be_zero else "above 0"

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number <= _MAX_SECONDS or (number == 0 and not may_be_zero):
            limit = f" and at most {_MAX_SECONDS:g}" if number > _MAX_SECONDS else ""
            raise argparse.ArgumentTypeError(
                f"Invalid number. Received: {text!r}. Expected: a number of seconds {smallest}{limit}, for example "
                f"{example:g}."
            )
        return number

    return parse


def required_variable(environ: Mapping[str, str], name: str, *, remedy: str) -> str:
    """Returns a variable, which must not be missing or empty."""
    value = environ.get(name, "").strip()
    if not value:
        raise ValueError(
            f"The environment variable {name} is missing. Received: {name}={environ.get(name)!r}. Expected: a value. "
            f"{remedy}"
        )
    return value


def integer_variable(environ: Mapping[str, str], name: str, *, remedy: str) -> int:
    """Returns a variable, which must not be missing, as an integer of at least 0."""
    value = required_variable(environ, name, remedy=remedy)
    if not (value.isascii() and value.isdigit()):
        raise ValueError(
            f"The environment variable {name} is not a number. Received: {name}={value!r}. Expected: an integer of at "
            f"least 0. {remedy}"
        )
    return int(value)


def optional_integer_variable(environ: Mapping[str, str], name: str, *, remedy: str) -> int | None:
    """Returns a variable as an integer, or None if it is not set."""
    return integer_variable(environ, name, remedy=remedy) if environ.get(name, "").strip() else None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
