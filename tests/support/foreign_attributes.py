"""Finds the private attributes of other libraries' objects that tfdist's source uses: an underscore name that none of
its own classes gives to the object.

The types of objects are not known here. In the internals an attribute counts as tfdist's own if a class in the same
file defines it, or, of `self`, a base class in another file of tfdist. Elsewhere any class of tfdist may, as few
objects of libraries occur there. Everything else is a library's.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


@dataclass
class _Module:
    """What a file defines: by class its attributes, and the names of its base classes."""

    attributes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bases: dict[str, list[str]] = field(default_factory=dict)


def is_private(name: object) -> bool:
    """Whether a name is private, and not one of Python's special names."""
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name != "_"


def attribute_uses(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.expr, str]]:
    """Private attributes that are read, written, or named in a call of `getattr` and its like: node, object, name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node, node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield node, node.args[0], name.value


def foreign_attributes(sources: dict[str, str]) -> dict[str, set[str]]:
    """By name the places (`file:line`) where an object of another library is asked for a private attribute.

    Args:
        sources: By path the source of every file of tfdist.
    """
    trees = {path: ast.parse(source) for path, source in sources.items()}
    modules = {path: _definitions(tree) for path, tree in trees.items()}
    by_class: dict[str, list[tuple[_Module, str]]] = defaultdict(list)
    for module in modules.values():
        for name in module.bases:
            by_class[name].append((module, name))
    of_all = {name for module in modules.values() for names in module.attributes.values() for name in names}
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        module = modules[path]
        own = set().union(*module.attributes.values()) if "_internals/" in path else of_all
        for kind, part in _parts(tree):
            inherited = _inherited(module, kind, by_class) if kind else set()
            for node, owner, name in attribute_uses(part):
                is_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
                is_self = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                known = inherited if is_super else own | inherited if is_self else own
                if name not in known:
                    found[name].add(f"{path}:{node.lineno}")
    return dict(found)


def _parts(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The statements of a file, each with the name of its class at the top level, or with ""."""
    for statement in tree.body:
        yield (statement.name if isinstance(statement, ast.ClassDef) else ""), statement


def _definitions(tree: ast.AST) -> _Module:
    """The classes of a file, also those in functions."""
    module = _Module()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        module.bases[kind.name] = [ast.unparse(base).split("[")[0].split(".")[-1] for base in kind.bases]
        names = module.attributes[kind.name]
        for node in kind.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in ast.walk(kind):
            is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_stored and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
    return module


def _inherited(module: _Module, kind: str, by_class: dict[str, list[tuple[_Module, str]]]) -> set[str]:
    """The attributes of the base classes of a class that tfdist defines."""
    found: set[str] = set()
    waiting, seen = list(module.bases.get(kind, ())), {kind}
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            for other, base in by_class.get(name, ()):
                found |= other.attributes[base]
                waiting += other.bases[base]
    return found
