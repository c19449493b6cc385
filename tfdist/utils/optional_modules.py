"""Imports libraries that only some installations have."""

import importlib
from typing import Any


def import_optional(module: str, message: str) -> Any:
    """Returns a module.

    Raises:
        ImportError: If it is not installed; with `message`, which says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(message) from error
