"""Parsers for the numbers on the command line; all of them reject bad values with the same form of message."""

import argparse
import math
from collections.abc import Callable

_MAX_SECONDS = 1e9  # the system calls that wait accept no more


def whole_number(*, at_least: int, example: int) -> Callable[[str], int]:
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
        if number < at_least:
            raise argparse.ArgumentTypeError(
                f"Invalid number. Received: {text!r}. Expected: a whole number of at least {at_least}, for example "
                f"{example}."
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
