"""Imports the optional libraries that hold data; an error says what to install."""

from typing import Any

from tfdist.utils.optional_modules import import_optional


def import_arrow(module: str = "pyarrow") -> Any:
    """Returns a module of Apache Arrow, such as `pyarrow.parquet`.

    Raises:
        ImportError: If it is not installed.
    """
    return import_library(module, "reads data in columns", "spark` or `dask` or `ray")


def import_library(module: str, purpose: str, extra: str) -> Any:
    """Returns an optional module.

    Raises:
        ImportError: If it is not installed. The message says how to install it.
    """
    library = module.partition(".")[0]
    return import_optional(
        module,
        f"{library}, which {purpose}, is not installed. Received: no module {module}. Expected: the extra `{extra}`, "
        f"or the library alone. Run: pip install {library}",
    )
