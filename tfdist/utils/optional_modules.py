"""Imports libraries that only some installations have."""

import importlib
from typing import Any


def import_optional(module: str, message: str) -> Any:
    """Returns a module; the message of an ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(message) from error


def import_library(module: str, purpose: str, extra: str) -> Any:
    """Returns a module of a library that has a purpose, and belongs to an extra of this package."""
    library = module.partition(".")[0]
    return import_optional(
        module,
        f"{library}, which {purpose}, is not installed. Received: no module {module}. Expected: the extra `{extra}`, "
        f"or the library alone. Run: pip install {library}",
    )
