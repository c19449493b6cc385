"""Looks up and records private symbols of TensorFlow and Keras; the error names a missing one."""

import importlib
from dataclasses import dataclass
from typing import Any

from packaging.version import Version


class MissingPrivateSymbolError(ImportError):
    """The installed TensorFlow or Keras does not have a private symbol that tfdist uses."""


@dataclass(frozen=True)
class PrivateSymbol:
    """One private symbol: its `path` (`module:attribute.attribute`) and `why` tfdist needs it."""

    path: str
    why: str


_used: dict[str, PrivateSymbol] = {}


def has_reached(library: str, version: str) -> bool:
    """Whether the imported `library` has at least this version. A pre-release counts as its release.

    >>> has_reached("keras", "3.10"), has_reached("keras", "99.0")
    (True, False)
    """
    installed = Version(importlib.import_module(library).__version__)
    return Version(installed.base_version) >= Version(version)


def private(path: str, why: str, *, since: str | None = None, before: Any = None) -> Any:
    """Returns the object at `path` and records its use.

    Args:
        path: `module:attribute.attribute`.
        why: What it is needed for; part of the error and of `docs/architecture.md`.
        since: The version of the library in which it appeared; None: every supported version has it.
        before: Returned by older versions, in which nothing is looked up.

    Raises:
        MissingPrivateSymbolError: If the module or the attribute does not exist; the message names it.

    >>> private("json:JSONDecoder.decode", why="an example").__name__
    'decode'
    >>> private("keras:not_yet", why="an example", since="99.0", before="another object")
    'another object'
    """
    module_name, _, attributes = path.partition(":")
    library = module_name.partition(".")[0]
    if since is not None and not has_reached(library, since):
        return before
    try:
        found = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise MissingPrivateSymbolError(
            f"tfdist needs {path!r} ({why}), which the installed {library} does not have. Received: {error}. "
            f"Expected: a {library} version within the range that tfdist was tested with "
            "(`tfdist.versions.tested_ranges()`). Install one of these, or report the version to tfdist."
        ) from error
    _used[path] = PrivateSymbol(path, why)
    return found


def used_symbols() -> list[PrivateSymbol]:
    """Returns the private symbols that this process has looked up, by path."""
    return [_used[path] for path in sorted(_used)]
