"""The rules of the code as tables, and the functions that find what breaks them.

`docs/architecture.md` gives the reasons; `tests/test_architecture.py` checks every file.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("tfdist", "strategies", "callbacks", "examples", "benchmarks")
MAX_LINES = 500

# A room is a sub-package or module of tfdist, or a top-level directory. `internals` is every package named *_internals.
# The sub-packages and modules of launch are rooms of their own.
PUBLIC = frozenset(
    "callbacks checkpoint cluster collectives compression data exchange launch parameter_server recovery spark "
    "strategies versions".split()
)
MAY_IMPORT: dict[str, frozenset[str]] = {
    "tfdist": frozenset(),  # tfdist/__init__.py
    "strategies": frozenset(
        "cluster collectives compression data_position elastic exchange internals load_balancing local_updates losses "
        "membership parameter_server patches pipeline planning private_symbols servers sharded_state strategy_hooks "
        "tensor_parallel training utils versions".split()
    ),
    "tensor_parallel": frozenset({"internals", "pipeline", "utils"}),
    "pipeline": frozenset({"collectives", "compression", "internals", "losses", "updates", "utils"}),
    "training": frozenset(
        "collectives compression internals load_balancing losses sharded_state strategy_hooks updates utils".split()
    ),
    "losses": frozenset({"internals"}),
    "load_balancing": frozenset({"internals", "utils"}),
    "local_updates": frozenset({"collectives", "compression", "internals", "utils"}),
    "sharded_state": frozenset({"collectives", "compression", "internals", "updates"}),
    "updates": frozenset({"collectives", "compression", "internals"}),
    "collectives": frozenset({"compression", "exchange", "internals", "utils"}),
    "elastic": frozenset("checkpoint cluster data_position exchange internals membership recovery utils".split()),
    "membership": frozenset({"exchange", "transport", "utils"}),
    "exchange": frozenset({"transport", "utils"}),
    "compression": frozenset({"internals", "utils"}),
    "parameter_server": frozenset(
        {"compression", "internals", "load_balancing", "losses", "servers", "updates", "utils"}
    ),
    "servers": frozenset({"cluster"}),
    "callbacks": frozenset(
        "checkpoint cluster collectives data_position internals load_balancing recovery training utils versions".split()
    ),
    "recovery": frozenset(
        "checkpoint cluster collectives data_position host_storage internals training utils versions".split()
    ),
    "spark": frozenset("callbacks data launch strategies utils".split()),
    "data": frozenset({"cluster", "internals", "utils"}),
    "data_position": frozenset({"internals", "utils"}),
    "checkpoint": frozenset({"utils"}),
    "host_storage": frozenset({"checkpoint", "exchange", "transport", "utils"}),
    "cluster": frozenset({"utils"}),
    "transport": frozenset({"utils"}),
    "launch": frozenset(
        "launch/cli launch/engines launch/function_call launch/notebook".split()
    ),  # launch/__init__.py and __main__.py
    "launch/cli": frozenset(
        "checkpoint cluster doctor launch/processes launch/rendezvous launch/restart "
        "launch/run_spec planning probe utils".split()
    ),
    "launch/notebook": frozenset("launch/cli launch/function_call launch/run_spec planning utils".split()),
    "launch/engines": frozenset("cluster launch/function_call launch/run_spec utils".split()),
    "launch/function_call": frozenset("cluster launch/cli launch/restart utils".split()),
    "launch/rendezvous": frozenset("cluster launch/processes launch/restart launch/run_spec transport utils".split()),
    "launch/processes": frozenset("cluster launch/restart launch/run_spec utils".split()),
    "launch/restart": frozenset("cluster launch/run_spec utils".split()),
    "launch/run_spec": frozenset({"cluster", "utils"}),
    "doctor": frozenset({"checkpoint", "cluster", "planning", "transport", "utils", "versions"}),
    "planning": frozenset({"utils"}),
    "probe": frozenset(
        "collectives compression exchange internals pipeline planning strategies training utils".split()
    ),
    "utils": frozenset(),
    "internals": frozenset({"patches", "private_symbols", "strategy_hooks", "utils"}),
    "private_symbols": frozenset(),
    "patches": frozenset(),
    "strategy_hooks": frozenset(),
    "versions": frozenset(),
    "examples": PUBLIC,
    "benchmarks": PUBLIC | {"training"},
}

# Modules that describe what the internals replace; the page's table leaves them out.
_EVERYWHERE = {"patches", "private_symbols", "strategy_hooks"}

FRAMEWORKS = frozenset({"keras", "tensorflow", "tensorflow_datasets", "tf_keras"})
WITHOUT_FRAMEWORKS = frozenset(
    "tfdist checkpoint cluster doctor exchange host_storage launch membership patches planning private_symbols "
    "strategy_hooks transport utils versions".split()
)
STANDARD_LIBRARY_ONLY = frozenset({"cluster"})
SIDE_EFFECT_FREE = TOPS[:3]

# `tf.__version__` and its like are everybody's; `tf.__internal__` is not.
PUBLIC_DUNDERS = frozenset({"__version__", "__name__", "__file__", "__path__", "__doc__", "__init__", "__call__"})
PRIVATE_MODULES = ("tensorflow.python", "tensorflow.compiler", "tensorflow.core", "keras.src", "keras._tf_keras")
# What may not be touched while a module is imported, as dotted prefixes.
IMPORT_EFFECTS = tuple(
    "os.environ os.getenv os.putenv logging.basicConfig logging.disable absl.logging.set_verbosity "
    "tensorflow.config tensorflow.get_logger tensorflow.Variable tensorflow.constant "
    "warnings.filterwarnings warnings.simplefilter".split()
)


def room_of(path: str) -> str:
    """The room of a file, by its path from the root."""
    top, *rest = Path(path).with_suffix("").parts
    if any(part.endswith("_internals") for part in rest):
        return "internals"
    if top != "tfdist":
        return top
    if rest[0] == "launch" and rest[1:] not in ([], ["__init__"], ["__main__"]):
        return f"launch/{rest[1]}"
    return "tfdist" if rest == ["__init__"] else rest[0]


def module_of(path: str) -> list[str]:
    """The dotted name under which a file is imported, as parts; a package's ends with `__init__`."""
    parts = list(Path(path).with_suffix("").parts)
    return ["tfdist", *parts] if parts[0] in ("strategies", "callbacks") else parts


def imports(tree: ast.AST, path: str) -> Iterator[tuple[int, str, str]]:
    """Every import, wherever it stands, as (line, absolute dotted name, the name it is bound to)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds a; `import a.b as c` binds a.b.
                yield node.lineno, alias.name, alias.asname or ""
        elif isinstance(node, ast.ImportFrom):
            base = module_of(path)[: -node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}", alias.asname or alias.name
        elif isinstance(node, ast.Call) and node.args and dotted(node.func).endswith(("import_module", "__import__")):
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, ""


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, and "" for any other."""
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return value and f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses(tree: ast.AST, bound: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Every dotted expression that begins with an imported name, as (line, absolute dotted name)."""
    for node in ast.walk(tree):
        yield from use(node, bound)


def use(node: ast.AST, bound: dict[str, str]) -> Iterator[tuple[int, str]]:
    head, _, tail = dotted(node).partition(".")
    if head in bound:
        yield node.lineno, f"{bound[head]}.{tail}".rstrip(".")  # type: ignore[attr-defined]


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: all but the bodies of functions, and what stands under `__main__`."""
    if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from at_import(child)


def private_strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private symbols that are named in a string, to be looked up by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PRIVATE_MODULES):
            if not any(character.isspace() for character in node.value):
                yield node.lineno, node.value


def is_private(name: str) -> bool:
    if name.startswith(PRIVATE_MODULES):
        return True
    return any(part.startswith("_") and part not in PUBLIC_DUNDERS for part in name.split(".")[1:])


def target_room(name: str) -> str:
    """The room of a dotted name, and "" for a name outside of tfdist or a submodule of `launch` that is no package."""
    library, _, rest = name.partition(".")
    if library != "tfdist" or not rest or rest.startswith("__"):
        return ""
    first, _, second = rest.partition(".")
    if first == "launch" and f"launch/{second.partition('.')[0]}" not in MAY_IMPORT:
        return "launch"  # tfdist.launch, or a name that its __init__ exports
    return room_of(f"tfdist/{rest.replace('.', '/')}.py")


def all_names(tree: ast.AST, path: str) -> tuple[dict[str, str], list[tuple[int, str]]]:
    """The names that a module's imports bind, and every dotted name that it imports or uses, with its line."""
    bound = {"importlib": "importlib"}
    names: list[tuple[int, str]] = []
    for line, name, alias in imports(tree, path):
        bound[alias or name.partition(".")[0]] = name if alias else name.partition(".")[0]
        names.append((line, name))
    return bound, [*names, *uses(tree, bound), *private_strings(tree)]


def violations(path: str, source: str) -> set[str]:
    """Every broken rule of one file, as "line: rule: what"."""
    room, tree, found = room_of(path), ast.parse(source), set()
    bound, names = all_names(tree, path)
    if room not in MAY_IMPORT:
        return {f"0: arrow: {room} has no entry in MAY_IMPORT of {Path(__file__).name}"}
    for line, name in names:
        library = name.partition(".")[0]
        if (target := target_room(name)) and target != room and target not in MAY_IMPORT[room]:
            found.add(f"{line}: arrow: {room} -> {target}")
        if library in ("strategies", "callbacks"):
            found.add(f"{line}: bare: import tfdist.{library}, not {library}")
        if library in FRAMEWORKS and room.partition("/")[0] in WITHOUT_FRAMEWORKS:
            found.add(f"{line}: framework: {room} uses {library}")
        if library in FRAMEWORKS and room != "internals" and is_private(name):
            found.add(f"{line}: private: {name}")
    if room in STANDARD_LIBRARY_ONLY:
        for line, name, _ in imports(tree, path):
            if name.partition(".")[0] not in {*sys.stdlib_module_names, "tfdist"}:
                found.add(f"{line}: library: {room} imports {name}, beyond the standard library")
    if path.startswith(SIDE_EFFECT_FREE):
        for node in at_import(tree):
            for line, name in use(node, bound):
                if name.startswith(IMPORT_EFFECTS):
                    found.add(f"{line}: import effect: {name}")
            if isinstance(node, ast.Attribute) and node.attr in ("setLevel", "addHandler"):
                found.add(f"{node.lineno}: import effect: {ast.unparse(node)}")
    if source.count("\n") > MAX_LINES:
        found.add(f"{MAX_LINES}: length: {source.count(chr(10))} lines; one concept a file, {MAX_LINES} lines at most")
    return found


def repeated_names(paths: Iterable[str]) -> dict[str, list[str]]:
    """The basenames that several modules of the package share. A reader who searches for a file must find one."""
    found = defaultdict(list)
    for path in paths:
        name = Path(path).name
        if path.startswith(SIDE_EFFECT_FREE) and name not in ("__init__.py", "__main__.py"):
            found[name].append(path)
    return {name: where for name, where in found.items() if len(where) > 1}


def unused_arrows(sources: dict[str, str]) -> dict[str, set[str]]:
    """The entries of MAY_IMPORT that no file needs. The table states what is, not what might be."""
    used = defaultdict(set)
    for path, source in sources.items():
        used[room_of(path)] |= {target_room(name) for _, name in all_names(ast.parse(source), path)[1]}
    internal = {room: targets for room, targets in MAY_IMPORT.items() if not targets >= PUBLIC}
    return {room: unused for room, targets in internal.items() if (unused := targets - used[room])}


def shown_arrows() -> dict[str, str]:
    """The last cell of each row of the page's tables of rooms, by the row's first cell.

    The page shows launch as one room, and then its sub-packages, whose names it shortens.
    """
    rooms = {room: set(targets) for room, targets in MAY_IMPORT.items() if "." not in room}
    parts = {room: targets for room, targets in rooms.items() if room.startswith("launch")}
    rooms["launch"] = {target for targets in parts.values() for target in targets if not target.startswith("launch")}
    titles = {room: f"`tfdist/{room}/`" for room in rooms} | {
        "strategies": "`strategies/` = `tfdist.strategies`",
        "callbacks": "`callbacks/` = `tfdist.callbacks`",
        "internals": "`tfdist/keras_internals/`, `tfdist/tensorflow_internals/`",
    }
    titles |= {room: f"`{room.removeprefix('launch/')}/`" for room in parts if room != "launch"}
    titles["launch/notebook"] = "`notebook.py`"
    left_out = {
        "tfdist",
        *_EVERYWHERE,
        "versions",
        "examples",
        "benchmarks",
        "launch/run_spec",
    }
    return {
        titles[room]: ", ".join(sorted(name.removeprefix("launch/") for name in targets - _EVERYWHERE)) or "–"
        for room, targets in rooms.items()
        if room not in left_out
    }


def house_files() -> list[str]:
    # rglob follows no links before Python 3.13, so strategies/ and callbacks/ are read only once.
    return sorted(
        str(file.relative_to(ROOT))
        for top in TOPS
        for file in (ROOT / top).rglob("*.py")
        if not any((ROOT / top / part).is_symlink() for part in file.relative_to(ROOT / top).parts[:1])
    )
