"""Parses rates, durations and numbers of workers, for the `type` of an argument of a command."""

import argparse
import math
import re

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_WORKERS = 2**20


def bits_per_second(text: str) -> float:
    """Parses the nominal rate of a link.

    >>> bits_per_second("1gbit"), bits_per_second("300Mbit/s")
    (1000000000.0, 300000000.0)
    >>> bits_per_second("0gbit")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: Invalid rate of a link. Received: '0gbit'. Expected: a number above 0 and a unit of
    kbit, mbit, gbit, for example 1gbit.
    """
    rate = _quantity(text.lower().removesuffix("/s"), _BITS)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(
            f"Invalid rate of a link. Received: {text!r}. Expected: a number above 0 and a unit of "
            f"{', '.join(_BITS)}, for example 1gbit."
        )
    return rate


def duration_seconds(text: str) -> float:
    """Parses a duration with its unit.

    >>> duration_seconds("0.5ms"), duration_seconds("30d")
    (0.0005, 2592000.0)
    >>> duration_seconds("30")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: Invalid duration. Received: '30'. Expected: a number of at least 0 and a unit of
    us, ms, s, min, h, d, for example 0.5ms or 30d.
    """
    seconds = _quantity(text.lower(), _SECONDS)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"Invalid duration. Received: {text!r}. Expected: a number of at least 0 and a unit of "
            f"{', '.join(_SECONDS)}, for example 0.5ms or 30d."
        )
    return seconds


def positive_seconds(text: str) -> float:
    """Parses a duration that is not 0.

    >>> positive_seconds("0s")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: The duration is 0. Received: '0s'. Expected: more than 0, for example 30d.
    """
    seconds = duration_seconds(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError(
            f"The duration is 0. Received: {text!r}. Expected: more than 0, for example 30d."
        )
    return seconds


def worker_numbers(text: str) -> tuple[int, ...]:
    """Parses numbers of workers: a list, or a range, which stands for both ends and the powers of two between them.

    >>> worker_numbers("2,8,64"), worker_numbers("3..20")
    ((2, 8, 64), (3, 4, 8, 16, 20))
    >>> worker_numbers("8..2")
    Traceback (most recent call last):
        ...
    argparse.ArgumentTypeError: Invalid numbers of workers. Received: '8..2'. Expected: numbers from 1 to 1048576,
    separated by commas, or a range such as 2..4096, the larger number last.
    """
    match = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text)
    if match:
        low, high = int(match[1]), int(match[2])
        powers = {2**power for power in range(high.bit_length()) if low <= 2**power <= high}
        numbers = sorted(powers | {low, high}) if low <= high else []
    elif re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        numbers = sorted({int(part) for part in text.split(",")})
    else:
        numbers = []
    if not numbers or not 1 <= numbers[0] <= numbers[-1] <= _MOST_WORKERS:
        raise argparse.ArgumentTypeError(
            f"Invalid numbers of workers. Received: {text!r}. Expected: numbers from 1 to {_MOST_WORKERS}, separated "
            "by commas, or a range such as 2..4096, the larger number last."
        )
    return tuple(numbers)


def _quantity(text: str, units: dict[str, float]) -> float:
    """Returns the number times its unit; NaN if the text is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    return float(match[1]) * units[match[2]] if match and match[2] in units else math.nan
