"""Keeps the rules of the house: which room may import which, where private symbols live, what an import may do.

The rules are the tables below; `docs/architecture.md` says why. Every rule is also shown a source that breaks it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("tfdist", "strategies", "callbacks", "examples", "benchmarks")
MAX_LINES = 300

# A room is a sub-package or module of tfdist, or a top-level directory; `internals` is every one named *_internals.
PUBLIC = frozenset(
    "callbacks checkpoint cluster collectives compression launch parameter_server strategies versions".split()
)
MAY_IMPORT: dict[str, frozenset[str]] = {
    "tfdist": frozenset(),  # tfdist/__init__.py
    "strategies": frozenset(
        "cluster collectives compression internals parameter_server private_symbols training versions".split()
    ),
    "training": frozenset({"collectives", "internals"}),
    "collectives": frozenset({"compression", "internals"}),
    "compression": frozenset(),
    "parameter_server": frozenset({"cluster", "compression", "internals"}),
    "callbacks": frozenset({"checkpoint", "cluster", "collectives", "internals", "recovery", "training"}),
    "recovery": frozenset({"checkpoint", "collectives", "compression", "internals", "training"}),
    "checkpoint": frozenset(),
    "cluster": frozenset(),
    "launch": frozenset({"checkpoint", "cluster", "doctor"}),
    "doctor": frozenset({"cluster", "versions"}),
    "internals": frozenset({"private_symbols", "versions"}),
    "private_symbols": frozenset(),
    "versions": frozenset(),
    "examples": PUBLIC,
    "benchmarks": PUBLIC,
}

FRAMEWORKS = frozenset({"keras", "tensorflow", "tensorflow_datasets", "tf_keras"})
WITHOUT_FRAMEWORKS = frozenset("tfdist checkpoint cluster doctor launch private_symbols versions".split())
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


def violations(path: str, source: str) -> set[str]:
    """Every broken rule of one file, as "line: rule: what"."""
    room, tree, found = room_of(path), ast.parse(source), set()
    bound = {"importlib": "importlib"}
    names: list[tuple[int, str]] = []
    for line, name, alias in imports(tree, path):
        bound[alias or name.partition(".")[0]] = name if alias else name.partition(".")[0]
        names.append((line, name))
    names += [*uses(tree, bound), *private_strings(tree)]

    if room not in MAY_IMPORT:
        return {f"0: arrow: {room} is not a room of the house; give it its arrows in {Path(__file__).name}"}
    for line, name in names:
        library, _, rest = name.partition(".")
        if library == "tfdist" and rest and not rest.startswith("__"):
            target = room_of(f"tfdist/{rest.replace('.', '/')}.py")
            if target != room and target not in MAY_IMPORT[room]:
                found.add(f"{line}: arrow: {room} -> {target}")
        if library in ("strategies", "callbacks"):
            found.add(f"{line}: bare: import tfdist.{library}, not {library}")
        if library in FRAMEWORKS and room in WITHOUT_FRAMEWORKS:
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


def house_files() -> list[str]:
    # rglob follows no links before Python 3.13: strategies/ and callbacks/ are read once, where they stand.
    return sorted(
        str(file.relative_to(ROOT))
        for top in TOPS
        for file in (ROOT / top).rglob("*.py")
        if not any((ROOT / top / part).is_symlink() for part in file.relative_to(ROOT / top).parts[:1])
    )


@pytest.mark.parametrize("path", house_files())
def test_file_keeps_the_rules(path: str) -> None:
    found = violations(path, (ROOT / path).read_text(encoding="utf-8"))
    assert not found, f"{path} breaks rules of the house:\n" + "\n".join(sorted(found))


def test_every_room_is_looked_at() -> None:
    assert {path.partition("/")[0] for path in house_files()} >= {"tfdist", "strategies", "callbacks", "examples"}


@pytest.mark.parametrize("name", ["strategies", "callbacks"])
def test_links_are_relative_and_resolve(name: str) -> None:
    link = ROOT / "tfdist" / name
    assert link.is_symlink() and str(link.readlink()) == f"../{name}"
    assert link.resolve() == ROOT / name and (link / "__init__.py").is_file()


BREAKS = [
    # (file, source, the rule it breaks)
    ("tfdist/launch/main.py", "import tfdist.strategies", "arrow: launch -> strategies"),
    ("tfdist/launch/main.py", "from tfdist import strategies", "arrow: launch -> strategies"),
    ("tfdist/launch/main.py", "from tfdist.strategies import mirrored", "arrow: launch -> strategies"),
    ("tfdist/launch/main.py", "from ..strategies import mirrored", "arrow: launch -> strategies"),
    ("tfdist/launch/main.py", "from .. import strategies", "arrow: launch -> strategies"),
    ("tfdist/launch/main.py", "import tfdist\ntfdist.strategies.MirroredStrategy()", "arrow: launch -> strategies"),
    ("tfdist/launch/main.py", "import tfdist as t\ndef f(): t.strategies", "arrow: launch -> strategies"),
    ("tfdist/launch/main.py", "import importlib\nimportlib.import_module('tfdist.strategies')", "arrow: launch ->"),
    ("tfdist/launch/main.py", "def f():\n    import keras", "framework: launch uses keras"),
    ("tfdist/launch/main.py", "from tensorflow import data", "framework: launch uses tensorflow"),
    ("tfdist/cluster/slurm.py", "import tensorflow as tf", "framework: cluster uses tensorflow"),
    ("tfdist/cluster/slurm.py", "import numpy", "library: cluster imports numpy"),
    ("tfdist/__init__.py", "from tfdist.strategies import X", "arrow: tfdist -> strategies"),
    ("tfdist/__init__.py", "import tensorflow", "framework: tfdist uses tensorflow"),
    ("tfdist/versions.py", "import keras", "framework: versions uses keras"),
    ("tfdist/compression/cast.py", "from tfdist.collectives import group", "arrow: compression -> collectives"),
    ("tfdist/compression/cast.py", "from tfdist import keras_internals", "arrow: compression -> internals"),
    ("tfdist/collectives/group.py", "from tfdist.training import step", "arrow: collectives -> training"),
    ("tfdist/training/step.py", "from tfdist.callbacks import x", "arrow: training -> callbacks"),
    ("tfdist/checkpoint/store.py", "from tfdist.strategies import x", "arrow: checkpoint -> strategies"),
    ("tfdist/checkpoint/store.py", "from tfdist.recovery import x", "arrow: checkpoint -> recovery"),
    ("tfdist/checkpoint/store.py", "def f():\n    import tensorflow", "framework: checkpoint uses tensorflow"),
    ("tfdist/launch/main.py", "from tfdist.recovery import x", "arrow: launch -> recovery"),
    ("tfdist/doctor/machine.py", "from tfdist.launch import x", "arrow: doctor -> launch"),
    ("tfdist/doctor/machine.py", "def f():\n    import tensorflow", "framework: doctor uses tensorflow"),
    ("tfdist/recovery/position.py", "from tfdist.strategies import x", "arrow: recovery -> strategies"),
    ("tfdist/recovery/position.py", "from tfdist.launch import x", "arrow: recovery -> launch"),
    ("strategies/a.py", "from tfdist.recovery import x", "arrow: strategies -> recovery"),
    ("tfdist/keras_internals.py", "from tfdist.training import x", "arrow: internals -> training"),
    ("callbacks/a.py", "from tfdist.strategies import MirroredStrategy", "arrow: callbacks -> strategies"),
    ("callbacks/a.py", "from ..strategies import MirroredStrategy", "arrow: callbacks -> strategies"),
    ("strategies/a.py", "from tfdist.callbacks import b", "arrow: strategies -> callbacks"),
    ("strategies/a.py", "from tfdist.launch import b", "arrow: strategies -> launch"),
    ("examples/a.py", "from tfdist.training import step", "arrow: examples -> training"),
    ("benchmarks/a.py", "from tfdist import tensorflow_internals", "arrow: benchmarks -> internals"),
    ("tfdist/unheard_of.py", "", "arrow: unheard_of is not a room"),
    ("examples/a.py", "import strategies", "bare: import tfdist.strategies"),
    ("callbacks/a.py", "from callbacks.b import c", "bare: import tfdist.callbacks"),
    ("strategies/a.py", "from tensorflow.python.distribute import values", "private: tensorflow.python"),
    ("strategies/a.py", "from tensorflow import python", "private: tensorflow.python"),
    ("strategies/a.py", "def f():\n    from keras.src import backend", "private: keras.src"),
    ("strategies/a.py", "import importlib\nimportlib.import_module('keras.src.backend')", "private: keras.src"),
    ("strategies/a.py", "from x import private\nprivate('keras.src.backend:f', 'why')", "private: keras.src.backend:f"),
    ("strategies/a.py", "import tensorflow as tf\ntf.__internal__.eager_context", "private: tensorflow.__internal__"),
    ("strategies/a.py", "import keras as k\nk.Model._lock", "private: keras.Model._lock"),
    ("strategies/a.py", "from keras import Model as M\nM._lock", "private: keras.Model._lock"),
    ("tfdist/collectives/a.py", "import os\nX = os.environ.get('X')", "import effect: os.environ"),
    ("tfdist/collectives/a.py", "from os import environ\nif environ: pass", "import effect: os.environ"),
    ("tfdist/collectives/a.py", "import os\nclass A:\n    x = os.getenv('X')", "import effect: os.getenv"),
    ("tfdist/collectives/a.py", "import os\ndef f(x=os.environ): pass", "import effect: os.environ"),
    ("strategies/a.py", "import logging\nlogging.basicConfig()", "import effect: logging.basicConfig"),
    ("strategies/a.py", "import logging\nlogging.getLogger('x').setLevel(1)", "import effect: logging"),
    ("strategies/a.py", "import tensorflow as tf\nX = tf.constant(1)", "import effect: tensorflow.constant"),
    ("callbacks/a.py", "\n" * 301, "length: 301 lines"),
]


@pytest.mark.parametrize(("path", "source", "rule"), BREAKS)
def test_rule_catches(path: str, source: str, rule: str) -> None:
    assert any(rule in found for found in violations(path, source)), violations(path, source)


KEEPS = [
    (
        "strategies/a.py",
        "import tensorflow as tf\nfrom tfdist import collectives, tensorflow_internals\ntf.__version__",
    ),
    ("strategies/a.py", "from tfdist.strategies import mirrored\nfrom .b import c\nself._private = tf_like._x"),
    ("callbacks/a.py", "from keras import callbacks\nclass A(callbacks.Callback): pass"),
    ("tfdist/keras_internals.py", "from keras.src import backend\nfrom tensorflow.python import x"),
    ("tfdist/internals/x_internals.py", "from keras.src import backend"),
    (
        "tfdist/launch/main.py",
        "import os\nfrom tfdist.cluster import ports\ndef f():\n    return os.environ, lambda: 1",
    ),
    ("strategies/a.py", "import tensorflow as tf\ndef f(a: list[tf.Variable]) -> tf.Variable: return tf.constant(1)"),
    ("tfdist/launch/main.py", "import logging\nlog = logging.getLogger(__name__)"),
    ("tfdist/launch/main.py", "import os\nif __name__ == '__main__':\n    os.environ['X'] = '1'"),
    ("examples/a.py", "import os\nimport tfdist\nos.environ['X'] = '1'\ntfdist.strategies.MirroredStrategy()"),
]


@pytest.mark.parametrize(("path", "source"), KEEPS)
def test_rule_lets_pass(path: str, source: str) -> None:
    assert not violations(path, source)
