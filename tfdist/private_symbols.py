"""Looks up and records private symbols of TensorFlow and Keras; the error names a missing one.

What a module or a class has is looked up when it is imported (`private`). What only an instance has is recorded with a
function that creates a small one (`private_attributes`), and looked up by `check_attributes`.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version


class MissingPrivateSymbolError(ImportError):
    """The installed TensorFlow or Keras does not have a private symbol that tfdist uses."""


@dataclass(frozen=True)
class PrivateSymbol:
    """One private symbol: its `path` (`module:attribute.attribute`) and `why` tfdist needs it.

    In the path of an attribute of instances the class is followed by `()`, as in `keras:Model()._compile_loss`.
    """

    path: str
    why: str

    @property
    def is_of_instances(self) -> bool:
        """Whether only instances have it, so that no import finds out that it is missing."""
        return "()" in self.path


@dataclass(frozen=True)
class InstanceKind:
    """Instances whose private attributes tfdist uses.

    Attributes:
        path: `module:Class()`, which need not be importable: it is a name for readers.
        attributes: What is used of it, by name.
        make: Creates a small instance, or another object with the same attributes; None if this needs a cluster.
    """

    path: str
    attributes: Mapping[str, PrivateSymbol]
    make: Callable[[], Any] | None

    def missing(self) -> list[tuple[PrivateSymbol, str]]:
        """Creates an instance, if it can, and returns each attribute that it lacks, with what was found instead."""
        if self.make is None:
            return []
        try:
            instance = self.make()
        except Exception as error:  # whatever a library that has changed raises
            failure = f"{type(error).__name__} while an instance was created: {' '.join(str(error).split())[:300]}"
            return [(symbol, failure) for symbol in self.attributes.values()]
        return [
            (symbol, f"an instance of {type(instance).__name__} without {name}")
            for name, symbol in self.attributes.items()
            if not hasattr(instance, name)
        ]


_used: dict[str, PrivateSymbol] = {}
_instance_kinds: dict[str, InstanceKind] = {}


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
        target = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            target = getattr(target, attribute)
    except (ImportError, AttributeError) as error:
        raise _missing(PrivateSymbol(path, why), str(error)) from error
    _used[path] = PrivateSymbol(path, why)
    return target


def private_members(reasons: Mapping[str, Mapping[str, str]]) -> None:
    """Looks up and records what is replaced, overridden or called by name: if renamed, it would have no effect.

    Args:
        reasons: What each is needed for, by its name, by the path of its module or class (`module:Class`).
    """
    for owner, whys in reasons.items():
        for name, why in whys.items():
            private(f"{owner}{'.' if ':' in owner else ':'}{name}", why)


def _missing(symbol: PrivateSymbol, received: str) -> MissingPrivateSymbolError:
    library = symbol.path.partition(":")[0].partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return MissingPrivateSymbolError(
        f"tfdist needs {symbol.path!r} ({symbol.why}), which the installed {f'{library} {version}'.strip()} does not "
        f"have. Received: {received}. Expected: a {library} version within the range that tfdist was tested with "
        "(`tfdist.versions.tested_ranges()`). Install one of these, or report the version to tfdist."
    )


def private_attributes(path: str, attributes: Mapping[str, str], make: Callable[[], Any] | None = None) -> None:
    """Records private attributes of instances. Nothing is looked up until `check_attributes`.

    Args:
        path: `module:Class()`; by its public name, if the class has one.
        attributes: What each attribute is needed for, by name.
        make: Creates a small instance. None if this needs a cluster: only a test looks these up.
    """
    symbols = {name: PrivateSymbol(f"{path}.{name}", why) for name, why in attributes.items()}
    _instance_kinds[path] = InstanceKind(path, symbols, make)
    _used.update({symbol.path: symbol for symbol in symbols.values()})


def instance_kinds() -> list[InstanceKind]:
    """Returns the kinds of instances whose attributes were recorded."""
    return list(_instance_kinds.values())


def check_attributes(kinds: Iterable[InstanceKind] | None = None) -> int:
    """Creates an instance of each kind and looks up its attributes. Only for child processes: the instances remain.

    Args:
        kinds: By default all that were recorded. Those that need a cluster are left out.

    Returns:
        The number of attributes that were looked up.

    Raises:
        MissingPrivateSymbolError: If one does not exist; the message names it, and the others.
    """
    kinds = [kind for kind in (_instance_kinds.values() if kinds is None else kinds) if kind.make]
    missing = [pair for kind in kinds for pair in kind.missing()]
    if missing:
        (first, received), *other_missing = missing
        also = f", nor {', '.join(repr(symbol.path) for symbol, _ in other_missing)}" if other_missing else ""
        raise _missing(first, received + also)
    return sum(len(kind.attributes) for kind in kinds)


def used_symbols() -> list[PrivateSymbol]:
    """Returns the private symbols that this process has looked up or recorded, by path."""
    return [_used[path] for path in sorted(_used)]
