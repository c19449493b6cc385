"""Packages that some tests need, and that not every environment has."""

import importlib.util

import pytest


def require(*names: str) -> None:
    """Skips a test, or a module, if a package is missing.

    Without an import, unlike `pytest.importorskip`: every process of the tests collects all modules, and would import
    what one of them needs.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)
