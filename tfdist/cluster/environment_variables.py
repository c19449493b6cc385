"""Reads environment variables, with errors that name the variable and the remedy."""

from collections.abc import Mapping


def required_variable(environ: Mapping[str, str], name: str, *, remedy: str) -> str:
    """Returns a variable.

    Raises:
        ValueError: If it is missing or empty.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise ValueError(
            f"The environment variable {name} is missing. Received: {name}={environ.get(name)!r}. Expected: a value. "
            f"{remedy}"
        )
    return value


def integer_variable(environ: Mapping[str, str], name: str, *, remedy: str) -> int:
    """Returns a variable as an integer.

    Raises:
        ValueError: If it is missing, or not an integer of at least 0.
    """
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
