"""Reading environment variables with errors that help."""

from collections.abc import Mapping


def required(environ: Mapping[str, str], name: str, *, remedy: str) -> str:
    """Returns the variable, or raises ValueError where it is missing or empty."""
    value = environ.get(name, "").strip()
    if not value:
        raise ValueError(
            f"The environment variable {name} is missing. Received: {name}={environ.get(name)!r}. Expected: a value. "
            f"{remedy}"
        )
    return value


def integer(environ: Mapping[str, str], name: str, *, remedy: str) -> int:
    """Returns the variable as an integer of at least 0, or raises ValueError."""
    value = required(environ, name, remedy=remedy)
    if not (value.isascii() and value.isdigit()):
        raise ValueError(
            f"The environment variable {name} is not a number. Received: {name}={value!r}. Expected: an integer of at "
            f"least 0. {remedy}"
        )
    return int(value)


def optional_integer(environ: Mapping[str, str], name: str, *, remedy: str) -> int | None:
    """Returns the variable as an integer, or None where it is not set."""
    return integer(environ, name, remedy=remedy) if environ.get(name, "").strip() else None
